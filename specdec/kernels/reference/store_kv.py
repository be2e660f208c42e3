"""Torch twin of `store_kv`: no shape depends on the data, and all slots valid, the common case, is one scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.check import FP8

FP8_MAX = 448.0


def store(pairs: tuple[tuple[Tensor, Tensor, Tensor | None], ...], slots: Tensor) -> None:
    """Write each (x [T, Hkv, D], cache [num_blocks, block_size, Hkv, D], scale) at the slots [T], dropping those outside."""
    if not slots.numel():
        return
    num_blocks, block_size = pairs[0][1].shape[:2]
    slots, source = _kept(slots.long(), num_blocks * block_size)
    for x, cache, scale in pairs:
        if cache.dtype == FP8:  # its bytes: 1-byte floats can't be scattered
            x, cache = quantised(x, scale).view(torch.uint8), cache.view(torch.uint8)
        if source is not None:
            x = x.index_select(0, source)
        _put(x, cache, slots)


def move(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots source [P] of cache [num_blocks, block_size, Hkv, D] to slots target [P], all read before any is written."""
    size = cache.shape[0] * cache.shape[1]
    kept = (source >= 0) & (source < size) & (target >= 0) & (target < size)
    source = torch.where(kept, source, 0).long()
    cache = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    held = cache[source // cache.shape[1], source % cache.shape[1]]
    slots, row = _kept(torch.where(kept, target, -1).long(), size)
    _put(held if row is None else held[row], cache, slots)


def quantised(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [T, Hkv, D] over its head's scale, saturated: a cast alone doesn't saturate everywhere."""
    x = x.float() if scale is None else x.float() / scale[:, None]
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _put(x: Tensor, cache: Tensor, slots: Tensor) -> None:
    num_blocks, block_size, heads, dim = cache.shape
    blocks, offsets, *rest = cache.stride()
    if blocks == block_size * offsets:
        cache.as_strided((num_blocks * block_size, heads, dim), (offsets, *rest)).index_copy_(0, slots, x)
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
