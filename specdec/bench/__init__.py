"""The latency benchmark: `specdec bench` and `specdec compare`.

The names below load on first use, so that the command line answers --help and bad usage without loading torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Benchmark": "specdec.bench.benchmark",
    "print_comparison": "specdec.bench.compare",
    "print_results": "specdec.bench.table",
    "read_document": "specdec.bench.document",
    "write_report": "specdec.bench.report",
}
__all__ = ["Benchmark", "print_comparison", "print_results", "read_document", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec.bench' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
