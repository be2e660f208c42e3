"""`flash_attn_with_kvcache` as flash-attn users know it, on the paged kernels: the same arguments and the same meaning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.check import INTS, check
from specdec.kernels.paged_attention import paged_attention
from specdec.kernels.store_kv import store_kv


@dataclass(frozen=True, slots=True)
class _Cache:
    """The caches as blocks: without a block table each sequence's cache is one block."""

    k: Tensor  # [num_blocks, block_size, Hkv, D]
    v: Tensor
    table: Tensor  # [B, M] int32
    lengths: Tensor  # [B] int32, before the append

    def positions(self, count: int) -> Tensor:
        """[B, count] int64: where the next `count` tokens stand."""
        return self.lengths[:, None].long() + torch.arange(count, device=self.lengths.device)

    def slots(self, count: int) -> Tensor:
        """[B * count] int64 slots of the next `count` tokens, -1 past the end of a block table."""
        size, position = self.k.shape[1], self.positions(count)
        entry = (position // size).clamp(max=self.table.shape[1] - 1)
        slot = torch.gather(self.table, 1, entry).long() * size + position % size
        return torch.where(position < self.table.shape[1] * size, slot, -1).flatten()


@dataclass(frozen=True, slots=True)
class _Rotary:
    """Rotary position embedding (Su et al., 2021) of the first rotary_dim columns."""

    cos: Tensor  # [S_max, rotary_dim / 2]
    sin: Tensor
    interleaved: bool  # pairs of neighbours, else a column and the one half of them away

    def __call__(self, x: Tensor, position: Tensor) -> Tensor:
        """x [B, S, H, D] turned to position [B, S] (or [B, 1])."""
        cos, sin = (table[position][:, :, None].float() for table in (self.cos, self.sin))
        dim = 2 * cos.shape[-1]
        turned, rest = x[..., :dim].float(), x[..., dim:]
        a, b = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        halves = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack(halves, -1).flatten(-2) if self.interleaved else torch.cat(halves, -1)
        return torch.cat([turned.to(x.dtype), rest], -1)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append k and v to the cache at cache_seqlens, then attend with q over all of it. Inference only.

    q [B, Sq, Hq, D]; k_cache [num_blocks, block_size, Hkv, D] with a block_table [B, M] int32, else [B_cache, S, Hkv, D],
    row cache_batch_idx[b] (or b) for sequence b; v_cache alike. k [B, Snew, Hkv, D] and v are appended in place. **As in
    flash-attn, cache_seqlens (int, or [B] int32; None: full caches) counts what the cache holds before the append.**
    Causal attention is aligned to the bottom right. window_size (left, right): a query sees `left` keys before its own;
    right is 0 for causal attention, -1 for none; -1 is unbounded. rotary_cos, rotary_sin [S_max, rotary_dim / 2] turn k,
    and q, to their positions. Blocks may have any size, and num_splits, a hint of speed, is the plan's to decide.
    Returns out [B, Sq, Hq, D], and with `return_softmax_lse` the natural-log lse [B, Hq, Sq].

    Raises ValueError for tensors that don't fit, and for what flash-attn has and this has not: cache_leftpad, right windows
    above 0, slopes of each sequence's own.
    """
    check("q", q, (None, None, None, None))
    _refuse(cache_leftpad, window_size, alibi_slopes, k is not None and cache_seqlens is None)
    _both_or_neither(k=k, v=v)
    _both_or_neither(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    batch, queries = q.shape[:2]
    causal, window = causal or window_size[1] == 0, window_size[0] + 1 if window_size[0] >= 0 else None
    cache = _cache(batch, k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table)
    if rotary_cos is not None and rotary_sin is not None:
        rotary = _Rotary(rotary_cos, rotary_sin, rotary_interleaved)
        moving = causal or window is not None  # else q stays at the position of the first new key
        q = rotary(q, cache.positions(queries if moving else 1))
        k = k if k is None else rotary(k, cache.positions(k.shape[1]))
    appended = 0
    if k is not None and v is not None:
        appended = k.shape[1]
        store_kv(k.flatten(0, 1), v.flatten(0, 1), cache.k, cache.v, cache.slots(appended))
    got = paged_attention(
        q.flatten(0, 1),
        cache.k,
        cache.v,
        block_table=cache.table,
        seq_lens=cache.lengths + appended,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries,
        max_seqlen_q=queries,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        window=window,
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        causal=causal,
        return_lse=return_softmax_lse,
    )
    out, lse = got if isinstance(got, tuple) else (got, None)
    out = out.view(batch, queries, *out.shape[1:])
    return out if lse is None else (out, lse.view(batch, queries, -1).transpose(1, 2).contiguous())


def _refuse(leftpad: Tensor | None, window_size: tuple[int, int], slopes: Tensor | None, unknown_end: bool) -> None:
    if leftpad is not None:
        raise ValueError("cache_leftpad: expected None (sequences start at position 0), got a tensor")
    if window_size[1] > 0:
        raise ValueError(f"window_size: expected 0 or -1 to the right, got {window_size}")
    if slopes is not None and slopes.ndim != 1:
        raise ValueError(f"alibi_slopes: expected [Hq], the same for all sequences, got {list(slopes.shape)}")
    if unknown_end:
        raise ValueError("cache_seqlens: expected where to append k, got None")


def _both_or_neither(**pair: Tensor | None) -> None:
    (first, a), (second, b) = pair.items()
    if (a is None) != (b is None):
        raise ValueError(f"{first}, {second}: expected both or neither, got {first if b is None else second} alone")


def _cache(
    batch: int,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: int | Tensor | None,
    batch_index: Tensor | None,
    table: Tensor | None,
) -> _Cache:
    check("k_cache", k_cache, (None, None, None, None))
    if table is None:
        table = torch.arange(batch, device=k_cache.device) if batch_index is None else batch_index
        table = table[:, None].int()
    elif batch_index is not None:
        raise ValueError("cache_batch_idx: expected None beside a block_table, got a tensor")
    check("block_table", table, (batch, None), INTS[:1], k_cache.device)
    if not isinstance(lengths, Tensor):
        full = table.shape[1] * k_cache.shape[1] if lengths is None else lengths
        lengths = torch.full((batch,), full, dtype=torch.int32, device=k_cache.device)
    check("cache_seqlens", lengths, (batch,), INTS[:1], k_cache.device)
    return _Cache(k_cache, v_cache, table, lengths)
