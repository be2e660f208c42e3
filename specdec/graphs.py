"""Rounds as CUDA graphs: one graph for each row bucket and shape, from the first draft step to the updated rows."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.advice import advise
from specdec.buckets import Buckets
from specdec.round import Round, RoundResult, RoundShape
from specdec.stopwatch import Laps
from specdec.uploads import send, sent

T = TypeVar("T")

_LONGEST = 0.25
"""Seconds; what is longer was no round but a pause between requests."""


@dataclass(slots=True)
class _Captured:
    """graph replays the round of the rows in `index` [bucket] int64, -1 for padding, into `result`. rows: as a list."""

    graph: torch.cuda.CUDAGraph
    index: Tensor
    result: RoundResult
    rows: list[int]

    def replay(self, rows: list[int]) -> RoundResult:
        """The round of `rows`, which are mostly those of the last one."""
        if rows != self.rows:
            send(padded(rows, len(self.index)), self.index)
            self.rows = [*rows]
        self.graph.replay()
        return self.result


class RoundGraphs:
    """Runs rounds by replay, capturing what `Buckets` asks for.

    A capture that fails is reported once and its shape runs step by step from then on: slower, the same tokens.
    """

    def __init__(self, round_: Round):
        self.round = round_
        self.captures = 0
        self._graphs: dict[tuple[int, RoundShape], _Captured | None] = {}
        self.buckets = Buckets()
        self._laps = Laps()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, rows: list[int], shape: RoundShape) -> RoundResult:
        """One round of `rows`. `shape.tokens` counts from the bucket's rows on: drafts are what exceeds len(rows)."""
        seconds = min(self._laps.lap(), _LONGEST)
        key = bucket, shape = self.buckets.choose(len(rows), shape, seconds, self.round.elastic)
        if key not in self._graphs:
            self._graphs[key] = self._capture(bucket, shape)
            if self._graphs[key]:
                self.buckets.add(key, self._laps.lap())
        captured = self._graphs[key]
        if captured is not None:
            return captured.replay(rows)
        return self.round.run(sent(padded(rows, bucket), self.round.rows.device), shape)

    def _capture(self, bucket: int, shape: RoundShape) -> _Captured | None:
        """Capture on the spare row alone: what a warm-up round writes there nobody reads."""
        index = torch.full((bucket,), -1, dtype=torch.int64, device=self.round.rows.device)
        try:
            graph, result = captured(lambda: self.round.run(index, shape), self._pool)
        except Exception as error:
            advise(f"a round of {bucket} rows could not be captured, it runs step by step: {error!r}")
            return None
        self.captures += 1
        if self.captures == 1:
            # What compiling leaves behind is looked through once, now, and not in the middle of a later round: a full
            # collection stops the host for as long as hundreds of rounds of a small model.
            gc.collect()
        return _Captured(graph, index, result, [])


def padded(rows: list[int], bucket: int) -> Tensor:
    """[bucket] int64: the rows of a round, -1 behind them."""
    return torch.tensor(rows + [-1] * (bucket - len(rows)))


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
