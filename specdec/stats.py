"""The engine's counters: sums since its start, and the time of its thread by part of a step. Host only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specdec.acceptance import Acceptance
from specdec.sequence import RequestStats

PARTS = ("prompts", "launch", "wait", "step")
"""Of the time of the engine's thread; `step` is all of it."""


@dataclass(slots=True)
class EngineStats:
    """Counts since the start, defined in docs/metrics.md. seconds: of the engine's thread, by part of a step."""

    rounds: int = 0
    row_rounds: int = 0
    stalls: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    dropped: int = 0
    prompt_tokens: int = 0
    drafter_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    accepted_per_round: Counter = field(default_factory=Counter)
    places: Acceptance = field(default_factory=Acceptance)
    finished: Counter = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent within it to a part of a step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def count(self, of_request: RequestStats, counts: dict[str, int], kept: int) -> None:
        """Add a row's round, here and to its request's: what it brought, and how many of its tokens were kept."""
        drafted, accepted = counts["num_drafts"], min(counts["num_accepted"], kept)
        cut = kept <= counts["num_accepted"]
        self.row_rounds += 1
        self.emitted += kept
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_per_round[accepted] += 1
        self.places.count(drafted, accepted, cut)
        of_request.count(kept, drafted, accepted, cut)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per row and round, bonus token included."""
        return self.emitted / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0
