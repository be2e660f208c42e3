"""Programmatic dependent launch: a kernel starts while the one before it ends, and hides its own start-up behind it.

A kernel launched so calls `wait` before it reads or writes anything that the kernels before it may touch; what nobody
writes, such as weights, it may load earlier. `wait` lets the next kernel start only after its own waiting, so whatever was
launched two kernels ago or earlier is over when a kernel starts; the inductor's kernels count on that too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def dependent(tensor: Tensor) -> dict[str, Any]:
    """Launch options, and the constant `DEPENDENT`, of a kernel that calls `wait`: on from sm_90, where it exists."""
    if tensor.is_cuda and _supported(tensor.device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@functools.cache
def _supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Until all kernels before this one are over and what they wrote can be read; then the next may start."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
