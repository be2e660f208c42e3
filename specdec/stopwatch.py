"""How long work takes where it runs: on a GPU between two places in its stream. Host only."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


_spare: dict[torch.device, list[torch.cuda.Event]] = defaultdict(list)
"""Events that have been read: to make one for every round takes the host longer than to record it."""


class Stopwatch:
    """The time from `__init__` to `stop`, and from each `go_on` to the next; on a GPU read without waiting for it."""

    def __init__(self, device: torch.device):
        self._device = device
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

    def read(self) -> float:
        """Seconds; once, when it is stopped and done."""
        events, self._events = self._events, []
        if events:
            milliseconds = sum(a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True))
            _spare[self._device] += events
            return milliseconds / 1e3
        return sum(self._times[1::2]) - sum(self._times[::2])

    def _note(self) -> None:
        if self._device.type != "cuda":
            self._times.append(time.perf_counter())
            return
        try:
            event = _spare[self._device].pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)


class Laps:
    """The host's own time from one call of `lap` to the next."""

    def __init__(self) -> None:
        self._last = 0.0

    def lap(self, aside: float = 0.0) -> float:
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
