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

    Every bucket is filled with the likeliest to survive of the drafts that are worth it.
    """
    found = []
    for steps in ladder(k):
        drafts = sorted(
            (-s, j, row) for row, c in enumerate(curves) for j, s in enumerate(c[:steps]) if s >= LEAST_RATE
        )
        for bucket in _buckets(batch, steps, costs):
            found.append(_filled(drafts[: batch * bucket], len(curves), batch, (steps, bucket), costs))
            if batch * bucket >= len(drafts):
                break
    return found


def shapes(batch: int, k: int, costs: Costs) -> list[tuple[int, int]]:
    """(draft steps, drafts per row) that `budgets` may give; wide ones first, then the narrow ones beside them.

    Once both are measured the others may be out of the question.
    """
    return [
        (steps, n) for steps in reversed(ladder(k)) for n in {steps: 0} | dict.fromkeys(_buckets(batch, steps, costs))
    ]


def _buckets(batch: int, steps: int, costs: Costs) -> list[int]:
    """1, 2, 4, ... drafts per row; without that search where it could save nothing: all that the steps give.

    A round that is bound by memory verifies as many drafts for the same time, and one row would leave its own out.
    """
    return [steps] if batch == 1 or costs.memory_bound(batch, steps) else ladder(steps)


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
