"""Refusing bad tensors before a kernel reads past their end: one ValueError that says what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


def check(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] = (),
    device: torch.device | None = None,
    *,
    unit_stride: bool = False,
) -> None:
    """Raise ValueError unless `tensor` fits: None in `shape` allows any size; no dtypes, or no device, allows any.

    `unit_stride` asks for a contiguous last dimension, without which a kernel can't load vectors.
    """
    got = tensor.shape
    if not _fits(got, shape):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(got)}")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if unit_stride and tensor.stride(-1) != 1 and got[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {list(tensor.stride())}")


def _fits(got: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(got) != len(shape):
        return False
    for have, want in zip(got, shape, strict=True):  # a loop, since this runs in every layer
        if want is not None and want != have:
            return False
    return True


def check_caches(k_cache: Tensor, v_cache: Tensor, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """Raise ValueError unless the caches are [..., num_blocks, block_size, Hkv, D] and Dv, of one dtype of `dtypes`."""
    shape = k_cache.shape if k_cache.ndim in (4, 5) else (None,) * 4
    check("k_cache", k_cache, shape, dtypes, device, unit_stride=True)
    check("v_cache", v_cache, (*shape[:-1], None), (k_cache.dtype,), device, unit_stride=True)
    if k_cache.dtype == FP8 and k_cache.is_cuda and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"k_cache: expected a dtype other than {FP8} on a GPU below compute capability 8.9, got it")
