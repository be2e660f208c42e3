"""How long work takes where it runs: on a GPU between two places in its stream. Host only."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """The time between `__init__` and `stop`, on a GPU read without waiting for it."""

    def __init__(self, device: torch.device):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._start = self._end = time.perf_counter()
        if self._events:
            self._events[0].record()

    def stop(self) -> Stopwatch:
        self._end = time.perf_counter()
        if self._events:
            self._events[1].record()
        return self

    @property
    def done(self) -> bool:
        return not self._events or self._events[1].query()

    @property
    def seconds(self) -> float:
        """To be asked for once it is done."""
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else self._end - self._start
