"""Figures from samples: quantiles, medians with their spread, intervals, acceptance by position. Plain numbers only."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

CURVE = tuple(q / 100 for q in (*range(0, 100, 5), 99, 100))
"""Where a distribution is kept: enough to draw it."""

FEW = 20
"""Samples below which a share is not shown."""
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Two-sided 95 % points of Student's t for 1 to 20 degrees of freedom."""


@dataclass(frozen=True)
class Spread:
    """A figure measured once per run: median, the lowest, the highest, and every run's value in order."""

    median: float
    low: float
    high: float
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError without a value."""
        if not values:
            raise ValueError("values: expected at least one, got none")
        return cls(statistics.median(values), min(values), max(values), list(values))

    @property
    def relative(self) -> float:
        """(high - low) / median, 0.0 for a single run or a median of 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Distribution:
    """Many samples of one quantity. curve: its values at the shares of CURVE. count: samples, by weight."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    curve: list[float]

    @classmethod
    def of(cls, values: Sequence[float], weights: Sequence[int] | None = None) -> Distribution | None:
        """None without a sample. weights: how often each value counts."""
        weights = [1] * len(values) if weights is None else weights
        if not sum(weights):
            return None
        p50, p90, p99, *curve = quantiles(values, (0.5, 0.9, 0.99, *CURVE), weights)
        mean = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
        return cls(sum(weights), mean, p50, p90, p99, curve)


@dataclass(frozen=True)
class Interval:
    """A ratio with its 95 % interval. over: what varied, "prompts" (bootstrap) or "runs" (lowest to highest)."""

    value: float
    low: float
    high: float
    over: str


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafts. All lists start at position 1, the first draft.

    length: tokens emitted per round, the bonus or corrected token included; 1.0 is plain decoding.
    rounds: of single rows. drafted, accepted: tokens; wasted = drafted - accepted: verified for nothing.
    histogram: rounds by accepted drafts, 0 first.
    conditional[i]: share of the rounds that drafted position i + 1 *and accepted all before it* that accepted it.
    unconditional[i]: share of all rounds that drafted position i + 1 that accepted it (and so all before it).
    reached[i]: how many rounds conditional[i] is a share of.
    """

    length: float
    rounds: int
    drafted: int
    accepted: int
    wasted: int
    histogram: list[int]
    conditional: list[float]
    unconditional: list[float]
    reached: list[int] = field(default_factory=list)

    @property
    def sure(self) -> int:
        """Positions, from the first, that at least FEW rounds reached: the shares of further ones are chance."""
        return next((i for i, n in enumerate(self.reached) if n < FEW), len(self.conditional))

    @classmethod
    def of(cls, rounds: Counter[tuple[int, int]], emitted: int) -> Acceptance:
        """rounds: how often (drafts verified, drafts accepted) happened in one row; emitted: tokens of all of them."""
        total = sum(rounds.values())
        drafted = sum(d * n for (d, _), n in rounds.items())
        accepted = sum(a * n for (_, a), n in rounds.items())
        histogram = [0] * (1 + max((a for _, a in rounds), default=0))
        for (_, a), n in rounds.items():
            histogram[a] += n
        depth = max((d for d, _ in rounds), default=0)
        positions = [_position(rounds, i) for i in range(1, depth + 1)]
        return cls(
            length=emitted / total if total else 0.0,
            rounds=total,
            drafted=drafted,
            accepted=accepted,
            wasted=drafted - accepted,
            histogram=histogram,
            conditional=[hit / reached if reached else 0.0 for hit, reached, _ in positions],
            unconditional=[hit / tried for hit, _, tried in positions],
            reached=[reached for _, reached, _ in positions],
        )


def _position(rounds: Counter[tuple[int, int]], i: int) -> tuple[int, int, int]:
    """Rounds that accepted position i, that reached it (accepted all before), that drafted it."""
    tried = sum(n for (d, _), n in rounds.items() if d >= i)
    reached = sum(n for (d, a), n in rounds.items() if d >= i and a >= i - 1)
    return sum(n for (d, a), n in rounds.items() if d >= i and a >= i), reached, tried


def quantiles(values: Sequence[float], at: Sequence[float], weights: Sequence[int] | None = None) -> list[float]:
    """For each share q of `at`, the smallest value that at least q of the weight does not exceed (no interpolation).

    Raises ValueError without a value, or for a share outside 0..1.
    """
    if not values:
        raise ValueError("values: expected at least one, got none")
    if any(not 0 <= q <= 1 for q in at):
        raise ValueError(f"at: expected shares from 0 to 1, got {list(at)}")
    pairs = sorted(zip(values, weights or [1] * len(values), strict=True))
    total, found = sum(w for _, w in pairs), dict[float, float]()
    seen, i = 0, -1
    for q in sorted(set(at)):
        while i < 0 or (seen < q * total - 1e-9 and i < len(pairs) - 1):
            i += 1
            seen += pairs[i][1]
        found[q] = pairs[i][0]
    return [found[q] for q in at]


def rate(samples: Sequence[tuple[float, float]]) -> float:
    """Sum of amounts over sum of seconds; 0.0 when no time passed. samples: (amount, seconds)."""
    seconds = sum(s for _, s in samples)
    return sum(amount for amount, _ in samples) / seconds if seconds else 0.0


def speedup(
    ours: Sequence[Sequence[tuple[float, float]]], base: Sequence[Sequence[tuple[float, float]]], draws: int = 1000
) -> Interval:
    """Ratio of two rates, paired: [runs][batches] of (tokens, seconds), the same batches in both.

    The value is the median over runs of the ratio within the run. With several batches of prompts the interval is the
    percentile bootstrap over them (Efron 1979): which prompts were asked varies most. With one, it is that of the runs.
    """
    ratios = [rate(a) / rate(b) if rate(b) else 0.0 for a, b in zip(ours, base, strict=True)]
    value, batches = statistics.median(ratios), len(ours[0])
    if batches < 2:
        return Interval(value, min(ratios), max(ratios), "runs")
    pooled = [[_pool(side, i) for i in range(batches)] for side in (ours, base)]
    rng = random.Random(0)
    found = sorted(_resampled(pooled[0], pooled[1], rng) for _ in range(draws))
    low, high = quantiles(found, (0.025, 0.975))
    return Interval(value, min(low, value), max(high, value), "prompts")


def _pool(side: Sequence[Sequence[tuple[float, float]]], i: int) -> tuple[float, float]:
    return sum(run[i][0] for run in side), sum(run[i][1] for run in side)


def _resampled(ours: list[tuple[float, float]], base: list[tuple[float, float]], rng: random.Random) -> float:
    picked = rng.choices(range(len(ours)), k=len(ours))
    below = rate([base[i] for i in picked])
    return rate([ours[i] for i in picked]) / below if below else 0.0


@dataclass(frozen=True)
class Change:
    """b over a, less one. noise: half the width of its 95 % interval, None where a side has a single run."""

    relative: float
    noise: float | None

    @classmethod
    def of(cls, a: Sequence[float], b: Sequence[float]) -> Change:
        """Of two samples of runs: the means of the logarithms, by Welch's unequal-variances t test (Welch 1947)."""
        x, y = [math.log(v) for v in a], [math.log(v) for v in b]
        ratio = statistics.fmean(y) - statistics.fmean(x)
        if len(x) < 2 or len(y) < 2:
            return cls(math.expm1(ratio), None)
        parts = [statistics.variance(s) / len(s) for s in (x, y)]
        variance = sum(parts)
        freedom = variance**2 / sum(p**2 / (len(s) - 1) for p, s in zip(parts, (x, y), strict=True)) if variance else 1
        return cls(math.expm1(ratio), t95(freedom) * math.sqrt(variance))

    @property
    def verdict(self) -> str:
        """ "more", "less", "within noise", or "unknown noise"."""
        if self.noise is None:
            return "unknown noise"
        if abs(math.log1p(self.relative)) <= self.noise:
            return "within noise"
        return "more" if self.relative > 0 else "less"


def t95(freedom: float) -> float:
    """Two-sided 95 % point of Student's t; the next lower whole number of degrees of freedom, 1.96 beyond the table's."""
    whole = max(1, math.floor(freedom + 1e-9))
    return _T95[whole - 1] if whole <= len(_T95) else 2.086 if whole < 60 else 2.0 if whole < 120 else 1.96


def expected_length(alpha: float, k: int) -> float:
    """Mean acceptance length of k drafts that are each accepted with probability alpha, independently (bonus included).

    (1 - alpha^(k+1)) / (1 - alpha), Leviathan et al., arXiv 2211.17192, equation 1.
    """
    return k + 1.0 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
