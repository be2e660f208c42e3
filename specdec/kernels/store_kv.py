"""Writing new keys and values into the slots of a paged cache, and moving them between slots."""

from __future__ import annotations

import triton
from torch import Tensor

from specdec.kernels.backend import on_device, use_triton
from specdec.kernels.check import FLOATS, FP8, INTS, check, check_caches
from specdec.kernels.dependent import dependent
from specdec.kernels.reference import store_kv as reference
from specdec.kernels.store_kernel import move_kernel, store_kernel

TOKENS, COLUMNS = 4, 1024
"""Tokens and columns that one program of the store copies: 8 KB of bf16 keys and as much of values in flight."""

MAX_MOVES = 128


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write k [T, Hkv, D] and v [T, Hkv, Dv] to the slots of k_cache [num_blocks, block_size, Hkv, D] and v_cache.

    slot_mapping [T] int64 or int32: block_id * block_size + offset; -1, and any slot outside of the cache, writes nothing.
    Two tokens must not share a slot. All four tensors may be views of any strides with a contiguous last dimension.
    float8_e4m3fn caches hold x / scale, saturated at +-448; k_scale, v_scale [Hkv] fp32, None is 1.

    Several layers at once, for drafters whose launches cost more than their bytes: k [L, T, Hkv, D], v alike, and caches
    [L, num_blocks, block_size, Hkv, D]; the scales then hold for all of them. Raises ValueError for tensors that don't fit.
    """
    if k.ndim != 4:
        k, v, k_cache, v_cache = k[None], v[None], k_cache[None], v_cache[None]
    check("k", k, (*k_cache.shape[:1], None, *k_cache.shape[3:]), FLOATS, unit_stride=True)
    check("v", v, (*k.shape[:2], *v_cache.shape[3:]), (k.dtype,), k.device, unit_stride=True)
    check_caches(k_cache, v_cache, (k.dtype, FP8), k.device)
    check("slot_mapping", slot_mapping, (k.shape[1],), INTS, k.device, unit_stride=True)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            check(name, scale, (k.shape[2],), FLOATS[:1], k.device, unit_stride=True)
            check("k_cache", k_cache, k_cache.shape, (FP8,))
    if use_triton(k):
        _launch(k, v, k_cache, v_cache, slot_mapping, (k_scale, v_scale))
    else:
        for layer in range(k.shape[0]):
            pairs = ((k[layer], k_cache[layer], k_scale), (v[layer], v_cache[layer], v_scale))
            reference.store(pairs, slot_mapping)


def move_kv(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Move KV between slots, as an accepted path of a tree is moved to where a chain would have put it.

    Caches [num_blocks, block_size, Hkv, D] and [..., Dv], or with a leading dimension of layers. source, target [R, P] (or
    [P]) int64 or int32 slots, P <= 128: what source[r, i] holds goes to target[r, i]; a pair with a slot outside of the
    cache moves nothing. Within a row all is read before any is written, so its moves may overlap; two rows may not.
    Raises ValueError for tensors that don't fit.
    """
    if k_cache.ndim != 5:
        k_cache, v_cache = k_cache[None], v_cache[None]
    if source.ndim == 1:
        source, target = source[None], target[None]
    check_caches(k_cache, v_cache, (*FLOATS, FP8), k_cache.device)
    check("source", source, (None, None), INTS, k_cache.device, unit_stride=True)
    check("target", target, source.shape, INTS, k_cache.device, unit_stride=True)
    if source.shape[1] > MAX_MOVES:
        raise ValueError(f"source: expected at most {MAX_MOVES} moves in a row, got {source.shape[1]}")
    for cache in (k_cache, v_cache):
        if use_triton(cache):
            _launch_move(cache, source, target)
        else:
            for layer in cache:
                reference.move(layer, source.flatten(), target.flatten())


def _launch(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: tuple[Tensor | None, Tensor | None]
) -> None:
    layers, tokens, heads, dim = k.shape
    widest = heads * max(dim, v.shape[3])
    columns = min(COLUMNS, triton.next_power_of_2(widest))
    grid = (triton.cdiv(tokens, TOKENS), triton.cdiv(widest, columns), layers)
    if not tokens * layers:
        return
    with on_device(k):
        store_kernel[grid](
            k, v, k_cache, v_cache, slots, *scales, tokens, k_cache.shape[1] * k_cache.shape[2],
            *k.stride()[:3], *v.stride()[:3], *k_cache.stride()[:4], *v_cache.stride()[:4],
            PAGE=k_cache.shape[2], H=heads, D=dim, DV=v.shape[3], TOKENS=TOKENS, COLUMNS=columns,
            **dependent(k),
        )  # fmt: skip


def _launch_move(cache: Tensor, source: Tensor, target: Tensor) -> None:
    layers, num_blocks, block_size, heads, dim = cache.shape
    rows, moves = source.shape
    held = triton.next_power_of_2(max(moves, 1))
    columns = min(triton.next_power_of_2(heads * dim), max(16, 4096 // held))
    if not rows * moves * layers:
        return
    with on_device(cache):
        move_kernel[(rows, triton.cdiv(heads * dim, columns), layers)](
            cache, source, target, moves, num_blocks * block_size, source.stride(0), target.stride(0), *cache.stride()[:4],
            PAGE=block_size, H=heads, D=dim, MOVES=held, COLUMNS=columns,
        )  # fmt: skip
