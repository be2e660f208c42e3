"""Where a call runs: Triton for CUDA tensors, the torch twins of `reference` for all others. The one dispatch there is.

On a CPU the kernels can run in Triton's interpreter, slowly: that is what tests of the kernels do. It takes both
TRITON_INTERPRET=1 before the first import of triton, and `interpreted()` around the call (or SPECDEC_INTERPRET=1 for a
whole process), since a process that interprets a few kernels rarely wants to interpret all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton decides at its import, so this is read once too."""

_forced = os.environ.get("SPECDEC_INTERPRET") == "1"


def use_triton(tensor: Tensor) -> bool:
    """Whether the call that `tensor` belongs to runs as a Triton kernel."""
    return tensor.is_cuda or _forced


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Makes the GPU of `tensor` the one that Triton launches on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@contextmanager
def interpreted() -> Iterator[None]:
    """Within it, CPU tensors go to the Triton kernels too. Raises RuntimeError unless Triton's interpreter is on."""
    global _forced
    if not INTERPRETED:
        raise RuntimeError("the interpreter is off: set TRITON_INTERPRET=1 before triton is first imported")
    before, _forced = _forced, True
    try:
        yield
    finally:
        _forced = before
