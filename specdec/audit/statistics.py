"""Tests of hypotheses: chi-square, uniformity, and two samples of whole outputs. Each says how often it alarms for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

ALPHA = 1e-5
"""Odds of a false alarm of a chi-square: its p-value must lie above."""

PERMUTATIONS = 9_999
ALPHA_PERMUTED = 1e-3
"""Odds of a false alarm of a permutation test; so many permutations can show 1e-4."""


def chi_square(observed: Tensor, expected: Tensor, *, lost: int = 1) -> float:
    """p-value of counts `observed` [C] against `expected` [C], cells below 5 pooled; `lost` degrees of freedom.

    Counts where nothing is expected give 0.
    """
    observed, expected = observed.double().flatten(), expected.double().flatten()
    if bool((observed[expected <= 0] > 0).any()):
        return 0.0
    small = expected < 5
    if bool(small.any()):
        pooled = torch.stack([observed[small].sum(), expected[small].sum()])
        observed, expected = (torch.cat([x[~small], pooled[i : i + 1]]) for i, x in enumerate((observed, expected)))
        if expected[-1] < 5:  # next to nothing: with the smallest cell that is enough
            observed, expected = _merged(observed), _merged(expected)
    freedom = len(expected) - lost
    if freedom < 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))


def _merged(cells: Tensor) -> Tensor:
    return torch.cat([cells[:-2], cells[-2:].sum(0, keepdim=True)])


def uniform(values: Tensor, cells: int = 16) -> float:
    """p-value of numbers in [0, 1) being even, by a chi-square."""
    counts = (values.double() * cells).long().clamp(0, cells - 1).bincount(minlength=cells)
    return chi_square(counts, torch.full((cells,), values.numel() / cells))


def two_samples(a: Sequence[Sequence[Hashable]], b: Sequence[Sequence[Hashable]], seed: int = 0) -> float:
    """p-value of two lists of outputs having one distribution: a permutation test, the unit being the whole output.

    Its statistic is the chi-square of the counts of units and of pairs of neighbours, by list. Whatever depends on
    whatever within an output, the odds of a p-value of x or less are x.
    """
    counts = [_features(output) for output in [*a, *b]]
    columns = {feature: i for i, feature in enumerate(dict.fromkeys(f for count in counts for f in count))}
    table = torch.zeros(len(counts), len(columns), dtype=torch.float64)
    for row, count in enumerate(counts):
        for feature, n in count.items():
            table[row, columns[feature]] = n
    total = table.sum(0)
    share = len(a) / len(counts)
    generator = torch.Generator().manual_seed(seed)
    first = torch.zeros(len(counts), dtype=torch.float64)
    first[: len(a)] = 1
    orders = torch.rand(PERMUTATIONS, len(counts), generator=generator).argsort(1)

    def statistic(members: Tensor) -> Tensor:
        return ((members @ table - share * total) ** 2 / total).sum(-1)

    found = statistic(first)
    reached = sum(int((statistic(first[part]) >= found - 1e-9).sum()) for part in orders.split(200))
    return (1 + reached) / (1 + PERMUTATIONS)


def _features(output: Sequence[Hashable]) -> Counter[Hashable]:
    return Counter([*output, *zip(output, output[1:], strict=False)])
