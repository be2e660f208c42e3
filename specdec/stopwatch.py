"""How long work takes where it runs: on a GPU between two places in its stream. Host only."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


class Stopwatch:
    """The time from `__init__` to `stop`, and from each `go_on` to the next; on a GPU read without waiting for it."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []  # starts and ends in turn, as are the times where there is no GPU
        self._times: list[float] = []
        self.go_on()

    def go_on(self) -> None:
        self._note()

    def stop(self) -> Stopwatch:
        self._note()
        return self

    @property
    def done(self) -> bool:
        return not self._events or self._events[-1].query()

    @property
    def seconds(self) -> float:
        """To be asked for once it is stopped and done."""
        if self._events:
            return sum(a.elapsed_time(b) for a, b in zip(self._events[::2], self._events[1::2], strict=True)) / 1e3
        return sum(self._times[1::2]) - sum(self._times[::2])

    def _note(self) -> None:
        if not self._cuda:
            self._times.append(time.perf_counter())
            return
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()


class Laps:
    """The host's own time from one call of `lap` to the next."""

    def __init__(self) -> None:
        self._last = 0.0

    def lap(self, aside: float) -> float:
        """Seconds since the call before. aside: those since the start that are not to count."""
        now = time.perf_counter() - aside
        seconds, self._last = now - self._last, now
        return seconds


def timed(stages: Generator[None, None, _Result], watch: Stopwatch | None) -> Generator[None, None, _Result]:
    """`stages` with the `watch`, if there is one, standing still in their pauses."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value
        if watch:
            watch.stop()
        yield
        if watch:
            watch.go_on()
