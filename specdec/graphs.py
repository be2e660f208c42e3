"""Rounds as CUDA graphs: one graph for each row bucket and shape, from the first draft step to the updated rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.advice import advise
from specdec.round import Round, RoundResult, RoundShape
from specdec.rows import upload

T = TypeVar("T")

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(slots=True)
class _Captured:
    """graph replays the round of the rows in `index` [bucket] int64, -1 for padding, into `result`."""

    graph: torch.cuda.CUDAGraph
    index: Tensor
    result: RoundResult


class RoundGraphs:
    """Runs rounds by replay, capturing each (row bucket, shape) at its first use.

    A capture that fails is reported once and its shape runs step by step from then on: slower, the same tokens.
    """

    def __init__(self, round_: Round):
        self.round = round_
        self.captures = 0
        self._graphs: dict[tuple[int, RoundShape], _Captured | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, rows: list[int], shape: RoundShape) -> RoundResult:
        """One round of `rows`. `shape.tokens` counts from the bucket's rows on: drafts are what exceeds len(rows)."""
        drafts = (shape.tokens or len(rows)) - len(rows)
        bucket, shape = self._bucket(len(rows), drafts, shape)
        key = (bucket, shape)
        if key not in self._graphs:
            self._graphs[key] = self._capture(bucket, shape)
        index = upload(torch.tensor(rows + [-1] * (bucket - len(rows))), self.round.rows.device)
        captured = self._graphs[key]
        if captured is None:
            return self.round.run(index.to(self.round.rows.device, non_blocking=True), shape)
        captured.index.copy_(index, non_blocking=True)
        captured.graph.replay()
        return captured.result

    def _bucket(self, rows: int, drafts: int, shape: RoundShape) -> tuple[int, RoundShape]:
        """The smallest captured bucket that holds the round, up to twice the rows; else the bucket to capture.

        While a batch drains, rounds of a bucket that is a little too wide beat a capture in the middle of them.
        """
        smallest = row_bucket(rows)
        for bucket in (b for b in ROW_BUCKETS if smallest <= b <= 2 * smallest):
            wider = self._shape(bucket, drafts, shape, rows)
            if (bucket, wider) in self._graphs:
                return bucket, wider
        return smallest, self._shape(smallest, drafts, shape, rows)

    @staticmethod
    def _shape(bucket: int, drafts: int, shape: RoundShape, rows: int) -> RoundShape:
        """The shape for `bucket` rows: its drafts a row rounded up to 0, 1, 2, 4, ..., so that graphs stay few."""
        per_row = rounded_up(-(-drafts // rows))
        return replace(shape, tokens=bucket * (1 + min(per_row, shape.draft_steps)))

    def _capture(self, bucket: int, shape: RoundShape) -> _Captured | None:
        """Capture on the spare row alone: what a warm-up round writes there nobody reads."""
        index = torch.full((bucket,), -1, dtype=torch.int64, device=self.round.rows.device)
        try:
            graph, result = captured(lambda: self.round.run(index, shape), self._pool)
        except Exception as error:
            advise(f"a round of {bucket} rows could not be captured, it runs step by step: {error!r}")
            return None
        self.captures += 1
        return _Captured(graph, index, result)


def captured(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """`run` as a graph in the memory of `pool`, and what it returned. Raises what `run` does, with the device at rest."""
    try:
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles kernels and layers, and lets libraries make their workspaces
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = run()
    except Exception:
        torch.cuda.synchronize()
        raise
    return graph, result


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for every stream that they have met."""
    return torch.cuda.Stream(device)


def rounded_up(drafts: int) -> int:
    """0, 1, 2, 4, 8, ...: the drafts per row that a graph has room for."""
    return 1 << (drafts - 1).bit_length() if drafts else 0


def row_bucket(rows: int) -> int:
    """The rows that a graph for `rows` rows has."""
    return next((b for b in ROW_BUCKETS if b >= rows), -(-rows // 64) * 64)
