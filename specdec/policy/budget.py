"""Budgets: draft steps and a token bucket, which drafts fill it, and what that promises beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.policy.costs import Costs

UNKNOWN = 1.0
"""Taken for what a draft step adds to a round, in plain rounds, before any was measured."""
LEAST_RATE = 0.05
"""A drafter that is right less often than this is not worth a round, however cheap."""


@dataclass(frozen=True, slots=True)
class Budget:
    """steps: draft steps; bucket: places for drafts per row; counts: drafts of each row.

    extra: what the round takes beyond a plain one, in plain rounds; value: its tokens per second beside plain decoding's.
    """

    steps: int
    bucket: int
    counts: list[int]
    extra: float
    value: float


def budgets(curves: Sequence[Sequence[float]], batch: int, k: int, costs: Costs) -> list[Budget]:
    """All that may be chosen for rows with these survival `curves`, of a round of `batch` rows: steps up to `k`.

    For every number of steps buckets of 1, 2, 4, ... drafts per row, filled with the likeliest to survive.
    """
    found = []
    for steps in ladder(k):
        drafts = sorted(
            (-s, j, row) for row, c in enumerate(curves) for j, s in enumerate(c[:steps]) if s >= LEAST_RATE
        )
        for bucket in ladder(steps):
            found.append(_filled(drafts[: batch * bucket], len(curves), batch, (steps, bucket), costs))
            if batch * bucket >= len(drafts):
                break
    return found


def _filled(
    drafts: list[tuple[float, int, int]], rows: int, batch: int, shape: tuple[int, int], costs: Costs
) -> Budget:
    counts = [0] * rows
    for _, _, row in drafts:
        counts[row] += 1
    extra = costs.extra(batch, shape[0], batch * shape[1])
    extra = UNKNOWN * shape[0] if extra is None else extra
    emitted = 1 - sum(draft[0] for draft in drafts) / batch
    return Budget(*shape, counts, extra, emitted / (1 + extra))


def ladder(k: int) -> list[int]:
    """1, 2, 4, ... and k: few numbers, since each is a shape to capture."""
    return [*(1 << i for i in range(k.bit_length()) if 1 << i < k), k] if k else []
