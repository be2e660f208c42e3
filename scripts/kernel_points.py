"""Benchmark points of paged attention: a pool of random KV, batches in it, and the fp64 check that comes before a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.kernels import launch, paged_attention, plan_attention
from specdec.kernels.config import Config
from specdec.kernels.options import Options

GRID = [
    (b, length)
    for b, lengths in (
        (1, (1024, 8192, 65536)),
        (8, (1024, 8192)),
        (32, (1024, 4096)),
        (128, (1024, 4096)),
        (256, (2048,)),
    )
    for length in lengths
]
QUERIES = (1, 4, 8, 16)
L2_BYTES = 256 * 2**20
"""Batches in turn cover so much KV that none finds its own in the cache."""


@dataclass(frozen=True)
class Point:
    """`lengths` of the sequences, each with `q_len` new tokens."""

    lengths: tuple[int, ...]
    q_len: int
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    in_order: bool = False
    split_size: int | None = None

    @property
    def kv_bytes(self) -> int:
        return 2 * sum(self.lengths) * self.heads[1] * self.dim * self.kv_dtype.itemsize

    @property
    def bytes(self) -> int:
        """The least that must move: keys, values, queries and outputs, each once."""
        return self.kv_bytes + 2 * len(self.lengths) * self.q_len * self.heads[0] * self.dim * self.dtype.itemsize


def uniform(batch: int, length: int, q_len: int, **changes: object) -> Point:
    return Point((length,) * batch, q_len, **changes)


class Pool:
    """One K and one V tensor per shape, that all points of the shape share: filling gigabytes takes longer than timing."""

    def __init__(self) -> None:
        self.key: tuple = ()
        self.caches: tuple[Tensor, Tensor] | None = None

    def get(self, point: Point, tokens: int) -> tuple[Tensor, Tensor]:
        key = (point.heads[1], point.dim, point.page, point.kv_dtype)
        if self.caches is None or self.key != key or self.caches[0].shape[0] * point.page < tokens:
            self.key, self.caches = key, None
            shape = (-(-tokens // point.page), point.page, point.heads[1], point.dim)
            made = [torch.randn(shape, dtype=point.dtype, device="cuda") for _ in range(2)]
            self.caches = made[0].to(point.kv_dtype), made[1].to(point.kv_dtype)
        return self.caches


@dataclass
class Batch:
    """A point's tensors; `tables` are batches of other blocks, so that the cache is cold when each has its turn."""

    point: Point
    q: Tensor
    caches: tuple[Tensor, Tensor]
    tables: list[Tensor]
    seq_lens: Tensor
    bounds: Tensor
    out: Tensor
    plans: list = field(default_factory=list)

    def lengths(self, table: int = 0) -> dict:
        return dict(
            block_table=self.tables[table],
            seq_lens=self.seq_lens,
            cu_seqlens_q=self.bounds,
            max_seqlen_q=self.point.q_len,
        )

    def call(self, table: int = 0, config: Config | None = None) -> Callable[[], object]:
        """One layer's attention, its plan made already, as for all layers but the first of a forward."""
        plan = plan_attention(**self.lengths(table), split_size=self.point.split_size)
        options = Options(self.point.dim**-0.5)
        return lambda: launch.attend(self.q, *self.caches, plan, options, self.out, None, config)

    def call_with_plan(self) -> Callable[[], object]:
        scale = self.point.dim**-0.5
        return lambda: paged_attention(self.q, *self.caches, **self.lengths(), scale=scale, out=self.out)


def make_batch(point: Point, pool: Pool, room: int = 0) -> Batch:
    """`room`: tokens that the pool should hold, for the points to come."""
    torch.manual_seed(0)
    blocks = [-(-n // point.page) for n in point.lengths]
    copies = max(1, min(64, -(-L2_BYTES // point.kv_bytes)))
    caches = pool.get(point, max(room, copies * sum(blocks) * point.page))
    total = caches[0].shape[0]
    ids = (torch.arange if point.in_order else torch.randperm)(total, dtype=torch.int32, device="cuda")
    tables, used = [], 0
    for _ in range(copies):
        table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device="cuda")
        for r, n in enumerate(blocks):
            table[r, :n] = ids[used : used + n]
            used += n
        tables.append(table)
    batch = len(point.lengths)
    q = torch.randn(batch * point.q_len, point.heads[0], point.dim, dtype=point.dtype, device="cuda")
    seq_lens = torch.tensor(point.lengths, dtype=torch.int32, device="cuda")
    bounds = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * point.q_len
    return Batch(point, q, caches, tables, seq_lens, bounds, torch.empty_like(q))


def check(batch: Batch, config: Config | None = None) -> float:
    """||error|| / ||output|| of the first and the last sequence against fp64, at most 64 queries at either end of each."""
    batch.out.fill_(float("nan"))
    batch.call(0, config)()
    point, errors = batch.point, []
    for r in {0, len(point.lengths) - 1}:
        rows = torch.arange(point.q_len, device="cuda")
        rows = torch.cat([rows[:64], rows[64:][-64:]])
        want = _fp64(batch, r, rows)
        got = batch.out[r * point.q_len + rows].double()
        errors.append(float((got - want).norm() / want.norm()))
    worst = max(errors)
    return worst if worst == worst else float("inf")


def _fp64(batch: Batch, r: int, rows: Tensor) -> Tensor:
    """[len(rows), Hq, D] of sequence r, a KV head at a time."""
    point = batch.point
    length, group = point.lengths[r], point.heads[0] // point.heads[1]
    pos = torch.arange(length, device="cuda")
    block, offset = batch.tables[0][r][pos // point.page].long(), pos % point.page
    seen = pos <= (length - point.q_len + rows)[:, None]
    out = torch.empty(len(rows), *batch.q.shape[1:], dtype=torch.float64, device="cuda")
    for head in range(point.heads[1]):
        k, v = (cache[block, offset, head].double() for cache in batch.caches)
        q = batch.q[r * point.q_len + rows][:, head * group : (head + 1) * group].double()
        scores = torch.einsum("qgd,kd->qgk", q, k) * point.dim**-0.5
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        out[:, head * group : (head + 1) * group] = weights @ v
    return out
