"""What rounds cost: their time by shape, learnt in use, and an estimate for shapes that have not run yet. Host only."""

from __future__ import annotations

import functools
import math
from collections import deque
from statistics import median_low

_HARDLY = 1.05
"""A round that takes at most so many times as long takes hardly longer."""
_SAMPLES = 5
"""Kept per shape: enough for a median to pass over an outlier, few enough to follow a context that grows."""

Key = tuple[int, int, float]


class Costs:
    """Seconds of rounds by (rows, draft steps, drafts per row), rows and drafts rounded up to powers of two.

    draft steps: forwards of a draft model before the verification; 0 for a drafter whose proposals cost next to nothing.
    """

    def __init__(self) -> None:
        self._seconds: dict[Key, deque[float]] = {}
        self._medians: dict[Key, float] = {}
        self._nearest: dict[
            Key, Key
        ] = {}  # to shapes that were asked for; forgotten when there are more to choose from
        self._catch_ups: dict[float, deque[float]] = {}

    def add(self, rows: int, steps: int, drafts: int, seconds: float) -> None:
        """Note a round of `rows` that verified `drafts` drafts in all."""
        key = _key(rows, steps, drafts)
        samples = self._seconds.setdefault(key, deque(maxlen=_SAMPLES))
        samples.append(seconds)
        self._medians[key] = median_low(samples)
        if len(samples) <= 2:  # a new shape, or a plain round whose time counts from now on
            self._nearest.clear()

    def plain(self, rows: int) -> float | None:
        """Seconds of a round without drafts; None before the second one, since a first one has much to set up."""
        key = _key(rows, 0, 0)
        return self._medians[key] if len(self._seconds.get(key, ())) > 1 else None

    def extra(self, rows: int, steps: int, drafts: int) -> float | None:
        """What such a round takes beyond a plain one, as a share of it; None before any drafted round was measured.

        A shape that has not run is scaled from the nearest one that has, by draft steps + drafts per row; of the same
        number of rows if there is one.
        """
        key = _key(rows, steps, drafts)
        if not _work(key):
            return 0.0
        if key not in self._nearest:  # asked several times a round, where dozens of shapes may be known
            known = [k for k in self._seconds if _work(k) > 0 and self.plain(k[0])]
            if not known:
                return None
            self._nearest[key] = min(known, key=lambda k: (_apart(k[0], key[0]), _apart(_work(k), _work(key)), k))
        nearest = self._nearest[key]
        return self._extra(nearest) * _work(key) / _work(nearest)

    def memory_bound(self, rows: int, steps: int) -> bool:
        """Whether rounds of so many rows hardly take longer for more drafts to verify, up to `steps` of each row.

        So it is where a round of at least as many steps was measured both with a wide bucket and with a narrow one.
        """
        times: dict[int, list[tuple[float, float]]] = {}
        for (r, s, drafts), seconds in self._medians.items():
            if r == _rounded(rows) and s >= steps:
                times.setdefault(s, []).append((drafts, seconds))
        pairs = [(min(measured), max(measured)) for measured in times.values()]
        return any(few < many >= steps and wide <= _HARDLY * narrow for (few, narrow), (many, wide) in pairs)

    def add_catch_up(self, tokens: int, seconds: float) -> None:
        """Note a forward of the drafter over `tokens` tokens that it had missed, in a prompt or since."""
        self._catch_ups.setdefault(_rounded(tokens), deque(maxlen=_SAMPLES)).append(seconds)

    def catch_up(self, tokens: int) -> float | None:
        """Seconds that the drafter takes for so many tokens; None before the second such forward, as for a plain round.

        Every forward that was measured is a bound: fewer tokens take no longer, n times as many at most n times.
        """
        if not tokens or sum(map(len, self._catch_ups.values())) < 2:
            return None if tokens else 0.0
        return min(median_low(took) * max(1.0, tokens / n) for n, took in self._catch_ups.items())

    def _extra(self, key: Key) -> float:
        plain = self.plain(key[0])
        assert plain is not None, "only shapes beside a measured plain round are looked up"
        return max(0.0, self._medians[key] / plain - 1)


@functools.lru_cache(4096)
def _key(rows: int, steps: int, drafts: int) -> Key:
    return int(_rounded(rows)), steps, _rounded(drafts / rows)


def _rounded(x: float) -> float:
    return 2.0 ** math.ceil(math.log2(x)) if x else 0.0


def _work(key: Key) -> float:
    return key[1] + key[2]


def _apart(a: float, b: float) -> float:
    return abs(math.log2(a / b))
