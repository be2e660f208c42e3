"""What became of drafts, by their place in a round: one definition of each rate, for requests and for the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

RowOutcome = tuple[int, int, int, bool]
"""What a round brought a row: tokens that were kept of what it emitted, drafts, those of them that were emitted, and whether
the output was `cut` there, as `Acceptance.count` has it. One is made for every row and round.
"""


def accepted_per_round(outcomes: Mapping[RowOutcome, int]) -> Counter[int]:
    """How many rounds accepted so many drafts. outcomes: how many brought what."""
    found = Counter[int]()
    for (_, _, accepted, _), times in outcomes.items():
        found[accepted] += times
    return found


@dataclass(slots=True)
class Acceptance:
    """Counts over rounds, entry i of the (i + 1)-th draft of a row. docs/metrics.md defines what is made of them.

    drafted: there was such a draft; tested: and all before it stood; accepted: and it stood too, and was emitted.
    """

    drafted: list[int] = field(default_factory=list)
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, outcomes: Mapping[RowOutcome, int]) -> Acceptance:
        """Of rounds by what they brought, and how often: alike ones are counted at once."""
        acceptance = cls()
        for (_, drafted, accepted, cut), times in outcomes.items():
            acceptance.count(drafted, accepted, cut, times)
        return acceptance

    def count(self, drafted: int, accepted: int, cut: bool = False, times: int = 1) -> None:
        """Add a row's round with so many drafts, of which the first `accepted` were emitted, and the next one did not
        stand, unless the output was `cut` there: it ended, and nothing is known of that draft. times: such rounds.
        """
        if not drafted:
            return
        tested = min(accepted + (not cut), drafted)
        missing = drafted - len(self.accepted)
        if missing > 0:
            self.drafted += [0] * missing
            self.tested += [0] * missing
            self.accepted += [0] * missing
        for i in range(drafted):
            self.drafted[i] += times
            if i < tested:
                self.tested[i] += times
            if i < accepted:
                self.accepted[i] += times

    @property
    def conditional(self) -> list[float]:
        """Of the drafts that were tested, the share that stood, by place."""
        return [a / t if t else 0.0 for a, t in zip(self.accepted, self.tested, strict=False)]

    @property
    def unconditional(self) -> list[float]:
        """Of all drafts, the share that stood, by place."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=False)]
