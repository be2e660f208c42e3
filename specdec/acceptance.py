"""What became of drafts, by their place in a round: one definition of each rate, for requests and for the engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Acceptance:
    """Counts over rounds, entry i of the (i + 1)-th draft of a row. docs/metrics.md defines what is made of them.

    Another thread may read them while rounds are counted: the last of them to grow is `accepted`.

    drafted: there was such a draft; tested: and all before it stood; accepted: and it stood too, and was emitted.
    """

    drafted: list[int] = field(default_factory=list)
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

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
