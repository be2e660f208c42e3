"""Noise that must be fresh in every round: seeds hashed from (seed, round, stream) on the device, without a counter to keep.

Every round of a row emits a token, so no two of them start at the same length l: it numbers the row's rounds.
"""

from __future__ import annotations

from torch import Tensor

DRAFT, ACCEPT, EMIT = 1, 2, 3
"""Streams: what drafts are drawn with, what decides how many stand, what draws the token after them. None knows another."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def fresh_seed(seed: Tensor, num_tokens: Tensor, stream: int) -> Tensor:
    """The seed of one round and one of the streams: seed [B] int64, num_tokens [B] int64 at the round's start -> [B] int64.

    Keyed by position alone, the noise of a draft that was judged and thrown away would come back when it is drafted again.
    """
    return _mix(_mix(_mix(seed) ^ stream) + num_tokens * _GOLDEN)


def uniform(seed: Tensor) -> Tensor:
    """One number in [0, 1) for each seed [B] int64: [B] fp64."""
    return _shift(_mix(seed + _GOLDEN), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014) of int64, which wraps."""
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
