"""Torch twin of `store_kv`: no shape depends on the data, and all slots valid, the common case, is one scatter."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0


def store(x: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    """Write x [T, Hkv, D] to the slots [T] of cache [num_blocks, block_size, Hkv, D], dropping slots outside of it."""
    if not slots.numel():
        return
    num_blocks, block_size, heads, dim = cache.shape
    if scale is not None:
        x = (x.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX)
    x, size = x.to(cache.dtype), num_blocks * block_size
    if cache.element_size() == 1:  # 1-byte floats can't be scattered
        x, cache = x.view(torch.uint8), cache.view(torch.uint8)
    slots, source = _kept(slots.long(), size)
    if source is not None:
        x = x.index_select(0, source)
    if cache.stride(0) == block_size * cache.stride(1):
        cache.as_strided((size, heads, dim), cache.stride()[1:]).index_copy_(0, slots, x)
    else:
        cache[slots // block_size, slots % block_size] = x


def _kept(slots: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """Slots to write and the row of x for each (None: its own). A dropped row writes a kept one's data once more."""
    low, high = slots.aminmax()
    if low >= 0 and high < size:
        return slots, None
    valid = (slots >= 0) & (slots < size)
    if not valid.any():
        return slots[:0], slots[:0]
    source = torch.where(valid, torch.arange(len(slots)), valid.int().argmax())
    return slots[source], source
