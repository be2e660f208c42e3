"""What became of drafts, by their place in a round: one definition of each rate, for requests and for the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Acceptance:
    """Rounds with drafts by what became of them, and counts of these by place, entry i of the (i + 1)-th draft of a row.
    docs/metrics.md defines what is made of them.

    rounds: by (drafts, those of them that were emitted, whether the output was cut there). It is all that a round changes:
    what the places add up to is asked for once, where rounds come by the thousand.
    """

    rounds: Counter[tuple[int, int, bool]] = field(default_factory=Counter)

    def count(self, drafted: int, accepted: int, cut: bool = False, times: int = 1) -> None:
        """Add a row's round with so many drafts, of which the first `accepted` were emitted, and the next one did not
        stand, unless the output was `cut` there: it ended, and nothing is known of that draft. times: such rounds.
        """
        if drafted:
            self.rounds[drafted, accepted, cut] += times

    @property
    def drafted(self) -> list[int]:
        """Rounds that had such a draft."""
        return self._by_place(lambda drafted, accepted, cut: drafted)

    @property
    def tested(self) -> list[int]:
        """Those of them in which all drafts before it stood."""
        return self._by_place(lambda drafted, accepted, cut: min(accepted + (not cut), drafted))

    @property
    def accepted(self) -> list[int]:
        """Those in which it stood too, and was emitted."""
        return self._by_place(lambda drafted, accepted, cut: accepted)

    @property
    def conditional(self) -> list[float]:
        """Of the drafts that were tested, the share that stood, by place."""
        now = self._now()
        return [a / t if t else 0.0 for a, t in zip(now.accepted, now.tested, strict=True)]

    @property
    def unconditional(self) -> list[float]:
        """Of all drafts, the share that stood, by place."""
        now = self._now()
        return [a / d if d else 0.0 for a, d in zip(now.accepted, now.drafted, strict=True)]

    def _now(self) -> Acceptance:
        """A copy, made in one go: another thread may be counting."""
        return Acceptance(Counter(dict(self.rounds)))

    def _by_place(self, upto: Callable[[int, int, bool], int]) -> list[int]:
        rounds = self._now().rounds
        counts = [0] * max((drafted for drafted, _, _ in rounds), default=0)
        for outcome, times in rounds.items():
            for i in range(upto(*outcome)):
                counts[i] += times
        return counts
