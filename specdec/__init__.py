"""Speculative decoding for Hugging Face language models on multi-token paged attention.

The names below load on first use: `import specdec.kernels` and `import specdec.kvpool` must not load transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.llm import LLM, Output, generate
    from specdec.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Output", "SamplingParams", "__version__", "generate"]

_HOMES = {
    "LLM": "specdec.llm",
    "Output": "specdec.llm",
    "SamplingParams": "specdec.sampling",
    "generate": "specdec.llm",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
