"""The engine's counters: sums since its start, and the time of its thread by part of a step. Host only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specdec.acceptance import Acceptance, RowOutcome, accepted_per_round

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
    outcomes: Counter[RowOutcome] = field(default_factory=Counter)
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

    @property
    def aside(self) -> float:
        """Seconds that are not the host's own work for rounds: waiting for the device, and prompts."""
        return self.seconds["wait"] + self.seconds["prompts"]

    def count(self, outcomes: Counter[RowOutcome]) -> None:
        """Add what became of the rows of a round, of which most are alike."""
        self.outcomes.update(outcomes)
        for (kept, drafted, accepted, _), times in outcomes.items():
            self.row_rounds += times
            self.emitted += times * kept
            self.drafted += times * drafted
            self.accepted += times * accepted

    @property
    def places(self) -> Acceptance:
        """What became of drafts by their place in a round, until now; safe from any thread."""
        return Acceptance.of(dict(self.outcomes))  # a copy in one piece, while rounds are counted

    @property
    def accepted_per_round(self) -> Counter[int]:
        """How many rounds of a row accepted so many drafts; likewise."""
        return accepted_per_round(dict(self.outcomes))

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per row and round, bonus token included."""
        return self.emitted / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0
