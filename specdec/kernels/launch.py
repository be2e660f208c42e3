"""Launching paged attention: the table of work, made once per forward and kind of layer, then the kernels of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specdec.kernels.attention_kernel import attention_kernel, reduce_kernel
from specdec.kernels.backend import INTERPRETED, on_device
from specdec.kernels.check import FP8
from specdec.kernels.config import FEW_KEYS, Config, config_for, device_limits, tile_columns
from specdec.kernels.dependent import dependent
from specdec.kernels.options import Options
from specdec.kernels.plan import AttentionPlan
from specdec.kernels.plan_kernel import ITEM, PAIR_COLUMNS, plan_kernel

REDUCE_ROWS = 8
"""Query rows of one program of the reduction."""

INVARIANT_ROWS = 64
"""Query rows whose tile the invariant mode always uses: few tokens and many then take the same instructions."""

PERSISTENT = 4
"""Programs per multiprocessor in the invariant mode, whose table is as long as the block tables are wide."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the table of work of a layer depends on besides the lengths: layers with equal shapes share one."""

    config: Config
    tokens: int
    kv_heads: int
    group: int
    pack: int  # columns that a load brings as one word
    dim: int  # padded
    v_dim: int  # padded
    block_size: int
    window: int | None
    causal: bool
    tree_words: int


@dataclass(slots=True)
class Work:
    """The table of work of one forward, and room for what splits leave behind."""

    head: Tensor  # [4] int32
    items: Tensor  # [max_items, ITEM] int32
    pairs: Tensor  # [max_pairs, PAIR_COLUMNS] int32
    counters: Tensor  # [max_pairs, Hkv] int32
    partial_o: Tensor  # [max_slots, Hkv, BLOCK_M, Dv] fp32
    partial_lse: Tensor  # [max_slots, Hkv, BLOCK_M] fp32


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    options: Options,
    out: Tensor,
    lse: Tensor | None,
    config: Config | None = None,
) -> None:
    """Fill out [T, Hq, Dv] and lse [T, Hq]; the arguments are `paged_attention`'s, checked. `config` is for measuring."""
    if not out.numel():
        return
    shape = _shape(q, k_cache, v_cache, plan, options, config)
    with on_device(q):
        if not plan.seq_lens.shape[0]:
            _nothing_seen(options, out, lse)
            return
        work = plan.shared(shape, lambda: _plan(plan, shape))
        _attend(shape, work, (q, k_cache, v_cache, out, lse), plan, options)
        if not shape.config.fused:
            _reduce(shape, work, (out, lse), options)


def _shape(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, options: Options, config: Config | None
) -> Shape:
    block_size, kv_heads, dim = k_cache.shape[1:]
    group, v_dim = q.shape[1] // kv_heads, v_cache.shape[3]
    config = config or _config(q, k_cache, plan, max(dim, v_dim))
    pack = 2 if q.dtype != torch.float32 and _packs(k_cache) and _packs(v_cache) else 1
    dims = tile_columns(dim, v_dim, config.block_m, pack), tile_columns(v_dim, dim, config.block_m, pack)
    tree_words = 0 if options.tree_mask is None else options.tree_mask.shape[1]
    return Shape(
        config, q.shape[0], kv_heads, group, pack, *dims, block_size, options.window, options.causal, tree_words
    )


def _config(q: Tensor, k_cache: Tensor, plan: AttentionPlan, dim: int) -> Config:
    block_size, kv_heads = k_cache.shape[1:3]
    (multiprocessors, memory), dtypes = device_limits(q), (q.dtype, k_cache.dtype)
    if plan.split_size:  # the same whatever else is in the batch, and however many queries
        return config_for(INVARIANT_ROWS, FEW_KEYS + 1, True, dim, dtypes, memory)._replace(fused=False)
    crowded = plan.seq_lens.shape[0] * kv_heads >= multiprocessors
    rows, keys = plan.max_seqlen_q * q.shape[1] // kv_heads, plan.block_table.numel() * block_size
    return config_for(rows, keys, crowded, dim, dtypes, memory)


def _bounds(plan: AttentionPlan, shape: Shape, workers: int) -> tuple[int, int, int]:
    """(items, pairs, slots) that no lengths exceed, so that nothing need be read back to size the table.

    Tiles of query rows are at most those of full rows, and at most one per sequence more than all tokens fill. A split
    in n parts has more than 1.25 chunks of keys, and n is then at most 1.6 times their number (plan_kernel._num_splits).
    """
    rows, config = plan.seq_lens.shape[0], shape.config
    tiles = min(
        rows * triton.cdiv(plan.max_seqlen_q * shape.group, config.block_m),
        shape.tokens * shape.group // config.block_m + rows,
    )
    if plan.split_size:
        most = tiles * triton.cdiv(plan.block_table.shape[1] * shape.block_size, plan.split_size)
        return max(most, 1), max(tiles, 1), max(most, 1)
    slots = triton.cdiv(8 * workers, 5 * shape.kv_heads)
    return tiles + slots, max(slots // 2, 1), slots


def _plan(plan: AttentionPlan, shape: Shape) -> Work:
    workers = device_limits(plan.seq_lens)[0] * shape.config.workers
    return _fill(plan, shape, workers, _bounds(plan, shape, workers))


def _fill(plan: AttentionPlan, shape: Shape, workers: int, bounds: tuple[int, int, int]) -> Work:
    """Allocate the table and launch the kernel that fills it."""
    config, device = shape.config, plan.seq_lens.device
    items, pairs, slots = bounds
    ints = lambda *size: torch.empty(size, dtype=torch.int32, device=device)  # noqa: E731
    floats = lambda *size: torch.empty(size, dtype=torch.float32, device=device)  # noqa: E731
    partial = (slots, shape.kv_heads, config.block_m)
    work = Work(
        ints(4), ints(items, ITEM.value), ints(pairs, PAIR_COLUMNS.value), ints(pairs, shape.kv_heads),
        floats(*partial, shape.v_dim), floats(*partial),
    )  # fmt: skip
    plan_kernel[(plan.seq_lens.shape[0],)](
        plan.cu_seqlens_q, plan.seq_lens, work.head, work.items, work.pairs, work.counters,
        plan.seq_lens.shape[0], shape.tokens, plan.block_table.shape[1] * shape.block_size, shape.window or 0,
        (plan.split_size or 0) // config.block_n, workers, items, pairs, slots,
        H_KV=shape.kv_heads, G=shape.group, BLOCK_M=config.block_m, BLOCK_N=config.block_n, CAUSAL=shape.causal,
        WINDOW=shape.window is not None, TREE_NODES=64 * shape.tree_words, FIXED=plan.split_size is not None,
        BLOCK_R=256, BLOCK_I=128,
    )  # fmt: skip
    return work


def _attend(shape: Shape, work: Work, tensors: tuple, plan: AttentionPlan, options: Options) -> None:
    q, k_cache, v_cache, out, lse = tensors
    config, dim, v_dim = shape.config, q.shape[2], v_cache.shape[3]
    if shape.pack == 2:
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    programs = work.items.shape[0] * shape.kv_heads
    if plan.split_size:
        programs = min(programs, PERSISTENT * device_limits(q)[0])
    tree = options.tree_mask
    attention_kernel[(programs,)](
        q, k_cache, v_cache, out, lse, work.head, work.items, work.pairs, work.partial_o, work.partial_lse,
        work.counters, plan.block_table, options.sinks, options.alibi_slopes, tree, options.k_scale, options.v_scale,
        options.scale, options.softcap, shape.window or 0, shape.tokens, plan.block_table.shape[1],
        plan.block_table.stride(0), 0 if tree is None else tree.stride(0), *q.stride()[:2], *k_cache.stride()[:3],
        *v_cache.stride()[:3], *out.stride()[:2],
        H_KV=shape.kv_heads, G=shape.group, D=dim, DV=v_dim, D_PAD=shape.dim,
        DV_PAD=shape.v_dim, PAGE=shape.block_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n, CAUSAL=shape.causal,
        WINDOW=shape.window is not None, TREE_WORDS=shape.tree_words, FUSED=config.fused,
        ALIKE=k_cache.stride() == v_cache.stride(), NARROW=max(_extent(k_cache), _extent(v_cache)) < 2**31,
        UPCAST=INTERPRETED, PERSISTENT=plan.split_size is not None,
        num_warps=config.warps, num_stages=config.stages, **dependent(q),
    )  # fmt: skip


def _packs(cache: Tensor) -> bool:
    """Whether an fp8 cache can be read two columns at a time, as int16: the kernel's quickest way to fp16."""
    even = all(n % 2 == 0 for n in (*cache.stride()[:3], cache.storage_offset(), cache.shape[3]))
    return cache.dtype == FP8 and even and cache.shape[3] > 16


def _extent(cache: Tensor) -> int:
    """Elements from the first of a head to past its last."""
    num_blocks, block_size, _, dim = cache.shape
    return (num_blocks - 1) * cache.stride(0) + (block_size - 1) * cache.stride(1) + dim


def _reduce(shape: Shape, work: Work, tensors: tuple[Tensor, Tensor | None], options: Options) -> None:
    out, lse = tensors
    lots = shape.kv_heads * (shape.config.block_m // REDUCE_ROWS)
    reduce_kernel[(work.pairs.shape[0] * lots,)](
        work.head, work.pairs, work.partial_o, work.partial_lse, out, lse, options.sinks, *out.stride()[:2],
        H_KV=shape.kv_heads, G=shape.group, DV=out.shape[2], DV_PAD=shape.v_dim, BLOCK_M=shape.config.block_m,
        ROWS=REDUCE_ROWS, num_warps=4, **dependent(out),
    )  # fmt: skip


def _nothing_seen(options: Options, out: Tensor, lse: Tensor | None) -> None:
    """A forward of no sequence, all padding."""
    out.zero_()
    if lse is not None:
        lse.copy_(options.sinks.expand_as(lse)) if options.sinks is not None else lse.fill_(float("-inf"))
