"""Break-even: the acceptance length that pays for a round's extra time, and the depth that pays best, from measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.bench.statistics import expected_length

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Cost:
    """What a round of one method costs at one load. k: "auto" where it drafts what pays.

    depth: drafts verified per row and round, on average.
    """

    method: str
    batch: int
    context: int
    k: int | str
    depth: float
    round_ms: float
    plain_round_ms: float

    @property
    def ratio(self) -> float:
        """Rounds of plain decoding in the time of one: so many tokens it must emit per row to break even."""
        return self.round_ms / self.plain_round_ms

    @property
    def full(self) -> bool:
        """Whether its rounds drafted k. Look-up drafts less where it finds nothing, "auto" where it pays; that costs less."""
        return isinstance(self.k, int) and self.depth >= 0.75 * self.k


@dataclass(frozen=True)
class BreakEven:
    """length: the acceptance length needed, bonus included. depth: drafts verified per row and round, on average.

    alpha: the acceptance per token that gives it; None if even accepting every draft does not (length > k + 1), and
    where rounds drafted less than k.
    """

    method: str
    batch: int
    context: int
    k: int | str
    depth: float
    round_ms: float
    plain_round_ms: float
    length: float
    alpha: float | None

    @property
    def share(self) -> float:
        """Of the drafts, that must be accepted; above 1 even all are not enough."""
        if self.length <= 1:
            return 0.0
        return (self.length - 1) / self.depth if self.depth else float("inf")


@dataclass(frozen=True)
class BestDepth:
    """For each acceptance per token (drafts alike, independent) the measured k that gains most; k = 0: none gains."""

    method: str
    batch: int
    context: int
    alpha: float
    k: int
    speedup: float


def break_even(cost: Cost) -> BreakEven:
    """The acceptance that `cost` needs."""
    alpha = alpha_for(cost.ratio, int(cost.k)) if cost.full else None
    return BreakEven(
        cost.method, cost.batch, cost.context, cost.k, cost.depth, cost.round_ms, cost.plain_round_ms, cost.ratio, alpha
    )


def alpha_for(length: float, k: int) -> float | None:
    """The per-token acceptance whose expected length at depth k is `length`; 0.0 below 1, None above k + 1."""
    if length > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length(middle, k) < length else (low, middle)
    return high if length > 1 else 0.0


def best_depths(costs: Sequence[Cost], alphas: Sequence[float] = ALPHAS) -> list[BestDepth]:
    """For each method and load in `costs`, the best of its measured (full) depths at each acceptance."""
    costs = [c for c in costs if c.full]
    loads = dict.fromkeys((c.method, c.batch, c.context) for c in costs)
    found = []
    for load in loads:
        mine = [c for c in costs if (c.method, c.batch, c.context) == load]
        for alpha in alphas:
            gains = {int(c.k): expected_length(alpha, int(c.k)) / c.ratio for c in mine}
            k, gain = max(gains.items(), key=lambda pair: pair[1])
            found.append(BestDepth(*load, alpha, *((k, gain) if gain > 1 else (0, 1.0))))
    return found
