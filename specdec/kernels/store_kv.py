"""Writing new keys and values into the slots of a paged cache."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.check import FLOATS, FP8, INTS, check, check_caches
from specdec.kernels.reference import store_kv as reference


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
    float8_e4m3fn caches hold x / scale, saturated at +-448; k_scale, v_scale [Hkv] fp32, None is 1. Raises ValueError for
    tensors that don't fit.
    """
    check("k", k, (None, *k_cache.shape[2:]), FLOATS, unit_stride=True)
    check_caches(k_cache, v_cache, (k.dtype, FP8), k.device)
    check("v", v, (k.shape[0], *v_cache.shape[2:]), (k.dtype,), k.device, unit_stride=True)
    check("slot_mapping", slot_mapping, (k.shape[0],), INTS, k.device, unit_stride=True)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            check(name, scale, (k.shape[1],), FLOATS[:1], k.device, unit_stride=True)
            check("k_cache", k_cache, k_cache.shape, (FP8,))
    reference.store(((k, k_cache, k_scale), (v, v_cache, v_scale)), slot_mapping)
