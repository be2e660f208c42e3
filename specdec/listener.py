"""Who is told what a sequence emits, and its end."""

from __future__ import annotations

from typing import Protocol

from specdec.sequence import Sequence


class Listener(Protocol):
    """Who is told what a sequence emits. An exception of a listener ends its own sequence and no other.

    The tokens are not the sequence's yet, but their log-probabilities are, if it asked for them.
    """

    def emitted(self, seq: Sequence, token_ids: list[int]) -> tuple[int, bool]:
        """New tokens; returns how many of them to keep, and whether the sequence ends there (a stop string)."""

    def finished(self, seq: Sequence) -> None:
        """The sequence is over: see its finish_reason and error."""
