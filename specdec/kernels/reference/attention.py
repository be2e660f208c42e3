"""Torch twin of paged attention, and the path that runs on a CPU: gathered keys and values, then PyTorch's own attention.

On a CPU the lengths are host memory, so the first layer of a forward reads them once and sorts the sequences into
segments of similar length, each one padded batch; the other layers find indices, masks and buffers ready.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.options import Options
from specdec.kernels.plan import AttentionPlan

WIDE = 32
"""More queries than this make a sequence a segment of its own: its padding would cost more than one more call does."""

SLACK = 0.5
"""The shortest sequence of a segment has at least this share of the longest one's keys."""


@dataclass(slots=True)
class Mask:
    """Which keys a segment's queries see: `visible` [n, Q, K] bool; `blind` [n, Q] bool, the queries that see none."""

    visible: Tensor
    blind: Tensor | None
    triangle: bool = False  # plain causal attention from the first key on
    rows: dict[torch.dtype, Tensor] = field(default_factory=dict)  # additive, in the shape that attention wants


@dataclass(slots=True)
class Segment:
    """n sequences padded to Q queries and K keys each; padding repeats the sequence's first query and first key."""

    starts: Tensor  # [n] int64, first row of q
    q_lens: Tensor  # [n] int64
    kv_lens: Tensor  # [n] int64
    q_max: int
    kv_max: int
    tokens: slice | Tensor  # n * Q rows of q
    kept: Tensor | None  # those of the n * Q that are no padding; None: all
    slots: slice | Tensor  # n * K slots of the cache
    shared: dict = field(default_factory=dict)  # masks and buffers, made by the first layer that needs them

    @property
    def wide(self) -> bool:
        return self.q_max > WIDE


@dataclass(slots=True)
class Segments:
    """A plan as a CPU needs it; `idle` are the rows of q whose sequence has no key, `end` is where padding begins."""

    segments: list[Segment]
    idle: list[slice]
    end: int


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, options: Options, out: Tensor, lse: Tensor | None
) -> None:
    """Fill out [T, Hq, Dv] and lse [T, Hq]; the arguments are `paged_attention`'s, checked."""
    block_size = k_cache.shape[1]
    work: Segments = plan.shared(("segments", block_size), lambda: segments_of(plan, block_size))
    for run in (*work.idle, slice(work.end, None)):
        out[run] = 0
        if lse is not None:
            lse[run] = float("-inf") if options.sinks is None else options.sinks
    for segment in work.segments:
        _attend_segment(segment, q, (k_cache, v_cache), options, out, lse)


def segments_of(plan: AttentionPlan, block_size: int) -> Segments:
    """Sort the plan's sequences, longest first, into segments."""
    bounds, kv_lens = plan.cu_seqlens_q.tolist(), plan.seq_lens.tolist()
    capacity = plan.block_table.shape[1] * block_size
    if max(kv_lens, default=0) > capacity:
        raise ValueError(f"seq_lens: expected at most the {capacity} positions of a block table, got {max(kv_lens)}")
    q_lens = [stop - start for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    live = [r for r, (n, kv) in enumerate(zip(q_lens, kv_lens, strict=True)) if n > 0 and kv > 0]
    idle = [slice(bounds[r], bounds[r + 1]) for r, n in enumerate(q_lens) if n > 0 and kv_lens[r] <= 0]
    groups: list[list[int]] = []
    for r in sorted(live, key=lambda r: -kv_lens[r]):
        first = groups[-1][0] if groups else r
        fits = groups and max(q_lens[r], q_lens[first]) <= WIDE and kv_lens[r] >= SLACK * kv_lens[first]
        groups[-1].append(r) if fits else groups.append([r])
    made = [_segment(plan, sorted(group), bounds, q_lens, kv_lens, block_size) for group in groups]
    return Segments(made, idle, bounds[-1])


def _segment(
    plan: AttentionPlan, rows: list[int], bounds: list[int], q_lens: list[int], kv_lens: list[int], block_size: int
) -> Segment:
    starts = torch.tensor([bounds[r] for r in rows])
    lens, kvs = torch.tensor([q_lens[r] for r in rows]), torch.tensor([kv_lens[r] for r in rows])
    q_max, kv_max = max(q_lens[r] for r in rows), max(kv_lens[r] for r in rows)
    i, pos = torch.arange(q_max), torch.arange(kv_max)
    packed = i < lens[:, None]
    tokens: slice | Tensor = (starts[:, None] + torch.where(packed, i, 0)).flatten()
    kept = None if bool(packed.all()) else packed.flatten().nonzero().flatten()
    if kept is None and rows == list(range(rows[0], rows[-1] + 1)):
        tokens = slice(bounds[rows[0]], bounds[rows[-1] + 1])
    pos = torch.where(pos < kvs[:, None], pos, 0)
    slots = plan.block_table[torch.tensor(rows)[:, None], pos // block_size].long() * block_size + pos % block_size
    return Segment(starts, lens, kvs, q_max, kv_max, tokens, kept, _as_slice(slots.flatten()))


def _as_slice(slots: Tensor) -> slice | Tensor:
    """A sequence whose blocks follow each other, as in a fresh pool, needs no gather at all."""
    first, n = int(slots[0]), slots.numel()
    return slice(first, first + n) if torch.equal(slots, torch.arange(first, first + n)) else slots


def _attend_segment(
    segment: Segment, q: Tensor, caches: tuple[Tensor, Tensor], options: Options, out: Tensor, lse: Tensor | None
) -> None:
    n, kv_heads = segment.starts.shape[0], caches[0].shape[2]
    rows = q[segment.tokens].view(n, segment.q_max, kv_heads, -1, q.shape[-1])  # [n, Q, Hkv, G, D]
    k = _keys(segment, "k", caches[0], options.k_scale, q.dtype)
    v = _keys(segment, "v", caches[1], options.v_scale, q.dtype)
    mask = segment.shared.get(key := (options.window, options.causal, options.tree_mask is not None))
    if mask is None or key[2]:
        mask = segment.shared[key] = _mask(segment, options)
    if options.plain and lse is None:
        got, dense = _sdpa(segment, rows, k, v, mask, options.scale), None
    else:
        got, dense = _softmax(segment, rows, k, v, mask, options)
    _scatter(segment, got, out)
    if lse is not None:
        assert dense is not None
        _scatter(segment, dense, lse)


def _keys(segment: Segment, name: str, cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The segment's keys or values, [n, K, Hkv, D]; a view where they lie in order, else in the segment's own buffer."""
    n, slots = segment.starts.shape[0], segment.slots
    num_blocks, block_size, heads, dim = cache.shape
    if cache.stride(0) == block_size * cache.stride(1):
        flat = cache.as_strided((num_blocks * block_size, heads, dim), cache.stride()[1:])
        if isinstance(slots, slice):
            got = flat[slots]
        else:
            bytes_ = flat.view(torch.uint8) if flat.element_size() == 1 else flat  # 1-byte floats can't be gathered
            buffer = segment.shared.setdefault((name, dim, heads, bytes_.dtype), bytes_.new_empty(0))
            got = torch.index_select(bytes_, 0, slots, out=buffer).view(flat.dtype)
    else:
        slots = torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        got = cache[slots // block_size, slots % block_size]
    got = got.view(n, -1, heads, dim)
    if got.dtype != dtype:
        got = got.to(dtype)
    return got if scale is None else got * scale[:, None].to(dtype)


def _mask(segment: Segment, options: Options) -> Mask | None:
    """None where every query sees every key of its sequence and there is no padding."""
    uniform = bool((segment.kv_lens == segment.kv_max).all())
    window = options.window
    one = segment.q_max == 1 and options.tree_mask is None
    if uniform and (one or not options.causal) and (window is None or segment.kv_max <= window):
        return None
    i, kpos, kv = torch.arange(segment.q_max)[:, None], torch.arange(segment.kv_max), segment.kv_lens[:, None, None]
    start = kv - segment.q_lens[:, None, None]
    qpos, seen = start + i, kpos < kv
    if options.tree_mask is not None:
        qpos, seen = _tree(segment, options.tree_mask, qpos, kpos - start, seen)
    elif options.causal:
        seen = seen & (kpos <= qpos)
    if window is not None:
        seen = seen & (qpos - kpos < window)
    seen = seen.expand(len(kv), segment.q_max, segment.kv_max)
    blind = ~seen.any(-1)
    unbounded = options.tree_mask is None and (window is None or window >= segment.kv_max)
    triangle = len(kv) == 1 and options.causal and unbounded and segment.q_max == segment.kv_max
    return Mask(seen, blind if bool(blind.any()) else None, triangle)


def _tree(segment: Segment, words: Tensor, qpos: Tensor, j: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(positions [n, Q, 1], visible [n, Q, K]) under bit rows; j [n, 1, K] numbers the new keys, negative for older."""
    count = words.shape[1]
    bits = (words[segment.tokens].view(len(segment.starts), -1, count, 1) >> torch.arange(64)) & 1
    bits = bits.flatten(2).bool()  # [n, Q, 64 W]
    bit = torch.gather(bits, 2, j.clamp(0, 64 * count - 1).expand(-1, bits.shape[1], -1))
    is_tree = (segment.q_lens <= 64 * count)[:, None, None]
    new = torch.where(is_tree, bit, j <= qpos - qpos[:, :1])
    depth = bits.sum(-1, keepdim=True) - 1
    return torch.where(is_tree, qpos[:, :1] + depth, qpos), seen & ((j < 0) | new)


def _additive(mask: Mask, dtype: torch.dtype, group: int) -> Tensor:
    """The mask to add to scores: [n, 1, Q, K] for the heads of a wide segment, else [n, 1, Q * G, K]."""
    if (got := mask.rows.get(dtype)) is None:
        got = torch.zeros(mask.visible.shape, dtype=dtype).masked_fill_(~mask.visible, float("-inf"))
        got = mask.rows[dtype] = got.repeat_interleave(group, 1)[:, None]
    return got


def _sdpa(segment: Segment, rows: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float) -> Tensor:
    """PyTorch's attention, [n, Q, Hkv, G, Dv]. Heads of a group share keys: as rows of one head, or a stride of 0."""
    n, q_max, heads, group, dim = rows.shape
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [n, Hkv, K, D]
    if segment.wide:
        k, v = (x[0][:, None].expand(-1, group, -1, -1) for x in (k, v))
        triangle = mask is not None and mask.triangle  # PyTorch's causal mask is top-left, so only then
        bias = None if mask is None or triangle else _additive(mask, rows.dtype, 1)
        wide = rows[0].permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
        got = F.scaled_dot_product_attention(wide, k, v, attn_mask=bias, is_causal=triangle, scale=scale)
        got = got.permute(2, 0, 1, 3)[None]
    else:
        packed = rows.transpose(1, 2).reshape(n, heads, q_max * group, dim)
        bias = None if mask is None else _additive(mask, rows.dtype, group)
        got = F.scaled_dot_product_attention(packed, k, v, attn_mask=bias, scale=scale)
        got = got.view(n, heads, q_max, group, -1).transpose(1, 2)
    return got if mask is None or mask.blind is None else got.masked_fill(mask.blind[..., None, None, None], 0)


def _softmax(
    segment: Segment, rows: Tensor, k: Tensor, v: Tensor, mask: Mask | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Attention with every option, in fp32: out [n, Q, Hkv, G, Dv] and its natural-log denominators [n, Q, Hkv, G]."""
    n, q_max, heads, group, _ = rows.shape
    packed = rows.transpose(1, 2).flatten(2, 3).float()  # [n, Hkv, Q * G, D]
    scores = packed @ k.permute(0, 2, 3, 1).float() * options.scale
    scores = scores.view(n, heads, q_max, group, -1)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.alibi_slopes is not None:
        scores = scores - options.alibi_slopes.view(heads, 1, group, 1) * _distance(segment)[:, None, :, None]
    if mask is not None:
        scores = scores.masked_fill(~mask.visible[:, None, :, None], float("-inf"))
    dense = torch.logsumexp(scores, -1)
    if options.sinks is not None:
        dense = torch.logaddexp(dense, options.sinks.view(heads, 1, group))
    weights = torch.exp(scores - dense.masked_fill(dense == float("-inf"), 0)[..., None])
    got = weights.flatten(2, 3) @ v.transpose(1, 2).float()
    return got.view(n, heads, q_max, group, -1).transpose(1, 2), dense.transpose(1, 2)


def _distance(segment: Segment) -> Tensor:
    """[n, Q, K] fp32 |query position - key position|."""
    first = (segment.kv_lens - segment.q_lens)[:, None, None]
    return (first + torch.arange(segment.q_max)[:, None] - torch.arange(segment.kv_max)).abs().float()


def _scatter(segment: Segment, got: Tensor, to: Tensor) -> None:
    """Write [n, Q, Hkv, G, ...] to the segment's rows of `to` [T, Hq, ...]."""
    if isinstance(segment.tokens, slice):
        to[segment.tokens].view(got.shape).copy_(got)
        return
    flat, tokens = got.reshape(-1, *to.shape[1:]), segment.tokens
    if segment.kept is not None:
        flat, tokens = flat[segment.kept], tokens[segment.kept]
    to.index_copy_(0, tokens, flat.to(to.dtype))
