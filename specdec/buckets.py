"""Which captured round runs a round: of those that hold it the smallest. Host only.

A capture stops all rows for seconds where the layers must be compiled for its tokens, as long as thousands of rounds of a
small model. So a new one is made only where none that there is holds the round, or where rounds have come again and again
that ran in one far too wide: those of a batch that drains come a few times, those of a service go on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from specdec.round import RoundShape

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

PATIENCE = 32
"""Rounds that run far too wide before a capture of their own."""

Captured = tuple[int, RoundShape]
"""The rows that a graph has, and its shape, whose tokens count padding rows and their drafts."""


class Buckets:
    """Chooses among what was captured; `add` says what was."""

    def __init__(self) -> None:
        self._captured: list[Captured] = []
        self._chosen: dict[Captured, tuple[Captured, Captured]] = {}
        self._waited: Counter[Captured] = Counter()

    def choose(self, rows: int, shape: RoundShape) -> Captured:
        """What is to run a round of `rows` rows, and to be captured first if it was not. The drafts that `shape.tokens` has
        room for are what exceeds the rows.
        """
        wish = rows, shape
        if wish not in self._chosen:
            self._chosen[wish] = self._find(rows, shape)
        found, wanted = self._chosen[wish]
        if found is wanted:
            return found
        self._waited[wanted] += 1
        return wanted if self._waited[wanted] > PATIENCE else found

    def add(self, captured: Captured) -> None:
        self._captured.append(captured)
        self._chosen.clear()

    def _find(self, rows: int, shape: RoundShape) -> tuple[Captured, Captured]:
        """The smallest that holds the round, and what should hold it: the same where the former is not far too wide."""
        drafts, anywhere = (shape.tokens or rows) - rows, replace(shape, tokens=None)
        own = _own(rows, drafts, shape)
        holding = [
            (bucket, held)
            for bucket, held in self._captured
            if bucket >= rows and _tokens(held) - rows >= drafts and replace(held, tokens=None) == anywhere
        ]
        if not holding:
            return own, own
        found = min(holding, key=lambda captured: (_tokens(captured[1]), captured[0]))
        near = found[0] <= 2 * own[0] and _tokens(found[1]) <= 2 * _tokens(own[1])
        return found, found if near else own


def _tokens(shape: RoundShape) -> int:
    assert shape.tokens is not None, "what is captured has a bucket"
    return shape.tokens


def _own(rows: int, drafts: int, shape: RoundShape) -> Captured:
    """The bucket made for such rounds: the drafts of a row rounded up to 0, 1, 2, 4, ..., so that graphs stay few."""
    bucket, per_row = row_bucket(rows), rounded_up(-(-drafts // rows))
    return bucket, replace(shape, tokens=bucket * (1 + min(per_row, shape.draft_steps)))


def rounded_up(drafts: int) -> int:
    """0, 1, 2, 4, 8, ...: the drafts per row that a graph has room for."""
    return 1 << (drafts - 1).bit_length() if drafts else 0


def row_bucket(rows: int) -> int:
    """The rows that a graph for `rows` rows has."""
    return next((b for b in ROW_BUCKETS if b >= rows), -(-rows // 64) * 64)
