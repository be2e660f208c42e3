"""Log-probabilities on the host: what people get for a token, and how many of the likeliest a round brings home."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WIDTHS = (0, 5, 20)
"""How many of the likeliest tokens a round reports: the next one up from what is asked, so that graphs stay few."""


class TokenLogprobs(NamedTuple):
    """A token, the natural logarithm of its probability, and the likeliest (token id, logprob) at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def width(asked: Iterable[int | None]) -> int | None:
    """The number to report for requests that asked for so many each; None if none asked."""
    wanted = [n for n in asked if n is not None]
    return next(n for n in WIDTHS if n >= max(wanted)) if wanted else None


def columns(top: int | None) -> int:
    """Numbers that `kernels.logprobs` gives for a token."""
    return 0 if top is None else 1 + 2 * top


def read(values: Sequence[Sequence[float]], token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Rows of `kernels.logprobs` for token_ids, of which `top` of the likeliest were asked for."""
    found = []
    for token, (logprob, *likeliest) in zip(token_ids, values, strict=True):
        ids, theirs = likeliest[: len(likeliest) // 2], likeliest[len(likeliest) // 2 :]
        pairs = [(int(i), x) for i, x in zip(ids[:top], theirs[:top], strict=True) if x > -math.inf]
        found.append(TokenLogprobs(token, logprob, tuple(pairs)))
    return found
