"""Timing on a GPU for the kernel benchmarks: CUDA-graph replays, and the two ceilings that times are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

BUDGET = 0.02
"""Seconds that one measurement takes, about."""


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, one after another, each run once before: compiling and planning are no part of it."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, budget: float = BUDGET) -> float:
    """Seconds of one replay: the median of five runs of back-to-back replays."""
    first = _run(graph, 3)
    count = max(2, min(200, int(budget / 5 / max(first, 1e-7))))
    return statistics.median(_run(graph, count) for _ in range(5))


def _run(graph: torch.cuda.CUDAGraph, count: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count / 1e3


def seconds(*calls: Callable[[], object], budget: float = BUDGET) -> float:
    """Seconds of one call, of calls that run one after another in a graph."""
    return replay_seconds(graph_of(calls), budget) / len(calls)


def copy_bandwidth() -> float:
    """Bytes per second of a 2 GB device copy, reads and writes counted: the driver's or a kernel's, whichever is faster."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    calls = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * source.nbytes / min(seconds(call, budget=0.2) for call in calls)


def matmul_rate() -> float:
    """bf16 FLOP per second of an 8192-cubed product of random matrices."""
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / seconds(lambda: torch.matmul(a, b), budget=0.2)
