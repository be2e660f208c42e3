"""The tests of hypotheses: their p-values are even where there is nothing to find, and small where there is."""

import random

import pytest
import scipy.stats
import torch

from specdec.audit.statistics import chi_square, two_samples, uniform


def test_chi_square_is_scipys():
    observed, expected = torch.tensor([12, 20, 33, 35]), torch.tensor([10.0, 25, 30, 35])
    wanted = scipy.stats.chisquare(observed.numpy(), expected.numpy()).pvalue
    assert chi_square(observed, expected) == pytest.approx(wanted, rel=1e-9)


def test_small_cells_are_pooled_and_impossible_ones_alarm():
    observed, expected = torch.tensor([50, 45, 2, 1, 2]), torch.tensor([50.0, 44, 2, 2, 2])
    pooled = scipy.stats.chisquare([50, 45, 5], [50, 44, 6]).pvalue
    assert chi_square(observed, expected) == pytest.approx(pooled, rel=1e-9)
    assert chi_square(torch.tensor([10, 1]), torch.tensor([11.0, 0])) == 0.0
    assert chi_square(torch.tensor([10]), torch.tensor([10.0])) == 1.0


def test_uniform():
    even = torch.linspace(0, 1, 4001)[:-1]
    assert uniform(even) > 0.999
    assert uniform(even.sqrt()) < 1e-9


def samples(n, seed, weights):
    rng = random.Random(seed)
    return [rng.choices("abcdef", weights, k=30) for _ in range(n)]


def test_two_samples_see_another_distribution_and_other_pairs():
    same = two_samples(samples(20, 1, [1] * 6), samples(20, 2, [1] * 6))
    assert same > 0.01  # of a p-value that is even: once in a hundred seeds, and the seed is fixed
    assert two_samples(samples(20, 1, [1] * 6), samples(20, 2, [2, 1, 1, 1, 1, 1])) < 1e-3
    ordered = [list("abcdef") * 5 for _ in range(20)]
    assert two_samples(samples(20, 1, [1] * 6), ordered) < 1e-3


def test_two_samples_of_outputs_that_hang_together_do_not_alarm():
    """Each output repeats a letter of its own thirty times: far from independent tokens, the same in both lists."""
    rng = random.Random(0)
    lists = [[[rng.choice("abcdef")] * 30 for _ in range(12)] for _ in range(2)]
    assert two_samples(*lists) > 0.01
