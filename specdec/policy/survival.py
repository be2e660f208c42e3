"""How far drafts survive, learnt from what rounds accept. Host only."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

_FIRST, _FIRST_WEIGHT = 0.7, 0.2
"""What is believed of a drafter that nothing is known of. The weight is small, so that a few rounds overrule it."""

_FADE = 0.97


class Survival:
    """Decayed counts of how often each of k drafts was right where those before it were: of a drafter, or of one row.

    decay: what earlier rounds count for after another one.
    """

    def __init__(self, decay: float, k: int):
        self.decay = decay
        self._tried, self._kept = [0.0] * k, [0.0] * k

    def add(self, drafted: int, accepted: int) -> None:
        """Note a round that verified `drafted` drafts, of which the first `accepted` were right."""
        tried, kept, decay = self._tried, self._kept, self.decay
        for j in range(min(accepted + 1, drafted, len(tried))):
            tried[j] = tried[j] * decay + 1
            kept[j] = kept[j] * decay + (j < accepted)

    def fade(self) -> None:
        """Once a round: positions that drafts do not reach any more are forgotten, or one bad round barred them for good."""
        for counts in (self._tried, self._kept):
            for j in range(len(counts)):
                counts[j] *= _FADE

    def rates(self, k: int, prior: list[float] | None = None) -> list[float]:
        """How likely each of k drafts is right, given that those before it are.

        prior: rates of the drafter, believed as much as one round of a row. Without it a position that was never
        reached is as good as the one before it.
        """
        rates: list[float] = []
        for j in range(k):
            belief, weight = (prior[j] if prior else rates[-1], 1.0) if prior or j else (_FIRST, _FIRST_WEIGHT)
            rates.append((self._kept[j] + weight * belief) / (self._tried[j] + weight))
        return rates


def curve(rates: list[float]) -> list[float]:
    """How likely each draft is accepted, from the `rates` of being right: falls along the drafts."""
    return list(accumulate(rates, mul))
