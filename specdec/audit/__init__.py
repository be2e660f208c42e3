"""The losslessness laboratory: `specdec audit`.

The names below load on first use, so that the command line answers --help and bad usage without loading torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Report": "specdec.audit.report",
    "Settings": "specdec.audit.laboratory",
    "audit": "specdec.audit.laboratory",
    "print_report": "specdec.audit.report",
}
__all__ = ["Report", "Settings", "audit", "print_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec.audit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
