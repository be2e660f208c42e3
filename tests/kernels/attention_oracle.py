"""Slow, obvious fp64 paged attention, random cases for it, and the kernels run on one.

Every slot and table entry that nobody owns is poison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.kernels import AttentionPlan, launch, plan_attention
from specdec.kernels.config import Config
from specdec.kernels.options import Options

WILD = 2**30
NAN, INF = float("nan"), float("inf")


@dataclass
class Case:
    """A call of `paged_attention`: its tensors, and the keywords beyond the lengths."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> dict[str, Any]:
        most = int((self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]).max()) if len(self.seq_lens) else 0
        lengths = dict(block_table=self.block_table, seq_lens=self.seq_lens, cu_seqlens_q=self.cu_seqlens_q)
        return lengths | dict(max_seqlen_q=most)

    @property
    def keywords(self) -> dict[str, Any]:
        return self.lengths | dict(scale=self.q.shape[-1] ** -0.5) | self.options


def blocks_for(kv_lens: list[int], block_size: int, spare: int = 3) -> tuple[Tensor, int]:
    """A shuffled block table for sequences of these lengths, wild in its unused entries, and the pool's block count."""
    counts = [-(-n // block_size) for n in kv_lens]
    total = sum(counts) + spare
    ids = torch.randperm(total)
    table = torch.full((len(kv_lens), max(counts, default=0) + 1), WILD, dtype=torch.int32)
    used = 0
    for r, n in enumerate(counts):
        table[r, :n] = ids[used : used + n]
        used += n
    return table, total


def make_case(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    layout: str = "NHD",
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random queries, keys and values. `layout`: NHD, HND, or KV for K and V interleaved in each block of one tensor."""
    torch.manual_seed(seed)
    table, num_blocks = blocks_for(kv_lens, block_size)
    k_cache, v_cache = empty_caches(num_blocks, block_size, heads[1], dims, dtype, layout)
    for r, n in enumerate(kv_lens):
        pos = torch.arange(n)
        block, offset = table[r][pos // block_size].long(), pos % block_size
        k_cache[block, offset] = torch.randn(n, heads[1], dims[0]).to(dtype)
        v_cache[block, offset] = torch.randn(n, heads[1], dims[1]).to(dtype)
    cu = torch.tensor([0, *q_lens]).cumsum(0).int()
    q = torch.randn(sum(q_lens) + padding, heads[0], dims[0]).to(dtype)
    return Case(q, k_cache, v_cache, table, torch.tensor(kv_lens, dtype=torch.int32), cu, options)


def empty_caches(
    num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, layout: str
) -> tuple[Tensor, Tensor]:
    """NaN caches, as views [num_blocks, block_size, heads, dim] of whatever lies beneath."""
    if layout == "HND":
        return tuple(torch.full((num_blocks, heads, block_size, d), NAN, dtype=dtype).transpose(1, 2) for d in dims)
    if layout == "KV":
        both = torch.full((num_blocks, 2, block_size, heads, max(dims)), NAN, dtype=dtype)
        return both[:, 0, ..., : dims[0]], both[:, 1, ..., : dims[1]]
    return tuple(torch.full((num_blocks, block_size, heads, d), NAN, dtype=dtype) for d in dims)


def attention_fp64(case: Case) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64, a sequence and a head at a time."""
    tokens, num_heads, _ = case.q.shape
    out = torch.zeros(tokens, num_heads, case.v_cache.shape[-1], dtype=torch.float64)
    sinks = case.options.get("sinks")
    lse = torch.full((tokens, num_heads), -INF, dtype=torch.float64)
    if sinks is not None:
        lse[:] = sinks.double()
    bounds = case.cu_seqlens_q.tolist()
    for r, kv in enumerate(case.seq_lens.tolist()):
        rows = slice(bounds[r], bounds[r + 1])
        k, v = (_sequence(case, r, kv, name) for name in ("k", "v"))
        position, seen = _seen(case.keywords, rows, kv)
        for h in range(num_heads if kv else 0):
            head = h // (num_heads // k.shape[1])
            scores = _scores(case.keywords, case.q[rows, h].double(), k[:, head], position, h)
            scores = scores.masked_fill(~seen, -INF)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].double().expand(len(scores), 1)], 1)
            lse[rows, h] = torch.logsumexp(scores, 1)
            out[rows, h] = torch.softmax(scores, 1).nan_to_num()[:, :kv] @ v[:, head]  # NaN: a row that sees nothing
    return out, lse


def _sequence(case: Case, r: int, kv: int, name: str) -> Tensor:
    cache, scale = getattr(case, f"{name}_cache"), case.options.get(f"{name}_scale")
    pos = torch.arange(kv)
    x = cache[case.block_table[r][pos // cache.shape[1]].long(), pos % cache.shape[1]].double()
    return x if scale is None else x * scale.double()[:, None]


def _scores(keywords: dict[str, Any], q: Tensor, k: Tensor, position: Tensor, h: int) -> Tensor:
    scores = q @ k.T * keywords["scale"]
    if (cap := keywords.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    if (slopes := keywords.get("alibi_slopes")) is not None:
        scores = scores - slopes[h].double() * (position[:, None] - torch.arange(len(k))).abs()
    return scores


def _seen(keywords: dict[str, Any], rows: slice, kv: int) -> tuple[Tensor, Tensor]:
    """(position of each query [q_len], which of the kv keys it sees [q_len, kv])."""
    q_len, words, window = rows.stop - rows.start, keywords.get("tree_mask"), keywords.get("window")
    first, pos = kv - q_len, torch.arange(kv)
    position = first + torch.arange(q_len)
    seen = pos <= position[:, None] if keywords.get("causal", True) else torch.ones(q_len, kv, dtype=torch.bool)
    words = words[:, None] if words is not None and words.ndim == 1 else words
    if words is not None and q_len <= 64 * words.shape[1]:
        bits = [[(int(word) >> b) & 1 for word in row for b in range(64)] for row in words[rows]]
        position = torch.tensor([first + sum(row) - 1 for row in bits], dtype=torch.int64)
        seen = torch.tensor([[p < first or bool(row[p - first]) for p in range(kv)] for row in bits]).view(q_len, kv)
    return position, seen.bool() if window is None else seen & (position[:, None] - pos < window)


def tree_of(parents: list[int]) -> Tensor:
    """[len(parents)] int64 bit rows: a node sees itself and its ancestors."""
    rows: list[int] = []
    for node, parent in enumerate(parents):
        rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
    return torch.tensor([row - 2**64 if row >= 2**63 else row for row in rows], dtype=torch.int64)


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, infinite where got is not finite."""
    if not torch.isfinite(got.float()).all():
        return math.inf
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def run_kernel(
    case: Case, config: Config, lse: bool = True, split_size: int | None = None, plan: AttentionPlan | None = None
) -> tuple[Tensor, Tensor | None]:
    """The kernels, whatever device the tensors are on, into poisoned outputs."""
    out = torch.full((*case.q.shape[:2], case.v_cache.shape[-1]), NAN, dtype=case.q.dtype, device=case.q.device)
    dense = torch.full(case.q.shape[:2], NAN, device=case.q.device) if lse else None
    named = dict(scale=case.q.shape[-1] ** -0.5) | case.options
    if (mask := named.get("tree_mask")) is not None and mask.ndim == 1:
        named["tree_mask"] = mask[:, None]
    plan = plan or plan_attention(**case.lengths, split_size=split_size)
    launch.attend(case.q, case.k_cache, case.v_cache, plan, Options(**named), out, dense, config)
    return out, dense
