"""Which captured round runs a round: of those that hold it the smallest. Host only.

A capture stops all rows for seconds where the layers must be compiled for its tokens, as long as thousands of rounds of a
small model. So a new one is made only where none that there is will do, or where others have cost about as much as it would:
whoever pays so, before he knows what is to come, pays at most twice what was needed (the ski rental problem).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from specdec.round import RoundShape

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

FREE = 16
"""Tokens that take hardly longer than two, since products read their weights once (kernels/linear.py)."""

Captured = tuple[int, RoundShape]
"""The rows that a graph has, and its shape, whose tokens count padding rows and their drafts."""


class Buckets:
    """Chooses among what was captured; `add` says what was.

    price: seconds that a capture takes, the mean of those that were made.
    """

    def __init__(self) -> None:
        self.price = 0.0
        self._captured: list[Captured] = []
        self._chosen: dict[tuple[int, RoundShape, bool], tuple[Captured, Captured]] = {}
        self._lost: defaultdict[Captured, float] = defaultdict(float)
        self._eager = False

    def choose(self, rows: int, shape: RoundShape, seconds: float = 0.0, elastic: bool = False) -> Captured:
        """What is to run a round of `rows` rows, and to be captured first if it was not.

        The drafts that `shape.tokens` has room for are what exceeds the rows (None: none). seconds: what a round takes at
        present; elastic: one with less room for drafts will do.
        """
        if shape.tokens is None:
            shape = replace(shape, tokens=rows)
        if self._eager:
            return _own(rows, shape, elastic)
        wish = rows, shape, elastic
        if wish not in self._chosen:
            self._chosen[wish] = self._find(*wish)
        found, better = self._chosen[wish]
        if found is better:
            return found
        few, many = sorted((_tokens(found[1]), _tokens(better[1])))
        self._lost[better] += seconds * (1 - few / many)
        return better if self._lost[better] > self.price else found

    def add(self, captured: Captured, seconds: float = 0.0) -> None:
        """seconds: that the capture took."""
        self._captured.append(captured)
        self.price += (seconds - self.price) / len(self._captured)
        self._chosen.clear()

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Within it every round gets a capture of its own: while nobody waits, to have them later."""
        self._eager = True
        try:
            yield
        finally:
            self._eager = False

    def _find(self, rows: int, shape: RoundShape, elastic: bool) -> tuple[Captured, Captured]:
        """The smallest that holds the round, else the widest that will do, else its own; and what would be better, if any."""
        own, drafts, anywhere = _own(rows, shape, elastic), _tokens(shape) - rows, replace(shape, tokens=None)
        able = [
            (bucket, held)
            for bucket, held in self._captured
            if bucket >= rows and replace(held, tokens=None) == anywhere
        ]
        holding = [(bucket, held) for bucket, held in able if _tokens(held) - rows >= drafts]
        if holding:
            found = min(holding, key=_size)
            return found, found if _tokens(found[1]) <= _tokens(own[1]) else own
        narrow = [(bucket, held) for bucket, held in able if _tokens(held) >= 2 * rows] if elastic else []
        return max(narrow, key=_size, default=own), own


def _size(captured: Captured) -> tuple[int, int]:
    return _tokens(captured[1]), captured[0]


def _tokens(shape: RoundShape) -> int:
    assert shape.tokens is not None, "what is captured has a bucket"
    return shape.tokens


def _own(rows: int, shape: RoundShape, elastic: bool) -> Captured:
    """The bucket made for such rounds: the drafts of a row rounded up to 0, 1, 2, 4, ..., so that graphs stay few; elastic
    ones get at once what is free.
    """
    bucket, per_row = row_bucket(rows), rounded_up(-(-(_tokens(shape) - rows) // rows))
    if elastic and per_row:
        per_row = max(per_row, FREE // bucket - 1)
    return bucket, replace(shape, tokens=bucket * (1 + min(per_row, shape.draft_steps)))


def rounded_up(drafts: int) -> int:
    """0, 1, 2, 4, 8, ...: the drafts per row that a graph has room for."""
    return 1 << (drafts - 1).bit_length() if drafts else 0


def row_bucket(rows: int) -> int:
    """The rows that a graph for `rows` rows has."""
    return next((b for b in ROW_BUCKETS if b >= rows), -(-rows // 64) * 64)
