"""Times the steps of an engine and tells which of them carry the work of a prompt."""

from __future__ import annotations

import time
from collections import deque

from specdec.bench.trace import StepTime
from specdec.engine import Engine
from specdec.sequence import Sequence, Status


class StepClock:
    """Steps `engine` for `seqs`, which may grow meanwhile. Nothing may be in flight when it starts.

    On a GPU the host reads a round one step after it launched it, so the device's work on a prompt that stood before
    that round is waited for one step later: a step counts as prompt work as well if the round that it reads was such.
    """

    def __init__(self, engine: Engine, seqs: list[Sequence]):
        self.engine, self.seqs = engine, seqs
        self._behind: deque[bool] = deque()  # of each round in flight: whether it was launched behind a prompt's chunk

    def step(self) -> StepTime:
        """One step, with what it did."""
        stats = self.engine.stats
        extending = any(seq.status in (Status.WAITING, Status.EXTENDING) for seq in self.seqs)
        rounds, rows, emitted, prompt = stats.rounds, stats.row_rounds, stats.emitted, stats.prompt_tokens
        started = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - started
        if stats.rounds > rounds:
            self._behind.append(extending)
        read = [self._behind.popleft() for _ in range(len(self._behind) - len(self.engine.flights))]
        return StepTime(
            seconds,
            rows=stats.row_rounds - rows,
            emitted=stats.emitted - emitted,
            prompt=extending or any(read),
            behind=any(read),
            prompt_tokens=stats.prompt_tokens - prompt,
        )
