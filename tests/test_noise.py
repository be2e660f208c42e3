"""Fresh seeds: one for each row, round and stream, and numbers spread evenly."""

import scipy.stats
import torch

from specdec.noise import ACCEPT, DRAFT, EMIT, fresh_seed, uniform


def test_no_two_rounds_or_streams_share_a_seed():
    seeds = torch.cat([torch.arange(-50, 50), torch.tensor([2**63 - 1, -(2**63)])])
    lengths = torch.arange(1, 101)
    each = [fresh_seed(seeds[:, None], lengths, stream) for stream in (DRAFT, ACCEPT, EMIT)]
    assert len(torch.stack(each).unique()) == 3 * 102 * 100  # a clash of 30,600 hashes of 64 bits: odds of 3e-11
    assert torch.equal(each[0][3], fresh_seed(seeds[3], lengths, DRAFT))


def test_numbers_are_even_over_rounds_seeds_and_streams():
    """Chi-square of 100,000 numbers in 64 cells, along each key; odds of a false alarm below 1e-6 each."""
    many = torch.arange(100_000)
    one = torch.ones_like(many)
    for seed, length in ((many, one), (one * 7, many), (many << 32, one * 3)):
        for stream in (DRAFT, ACCEPT, EMIT):
            u = uniform(fresh_seed(seed, length, stream))
            assert 0 <= u.min() and u.max() < 1
            cells = (u * 64).long().bincount(minlength=64)
            assert scipy.stats.chisquare(cells.numpy()).pvalue > 1e-6


def test_streams_of_a_round_are_independent():
    """A chi-square over 8 x 8 cells of each pair of streams, and of two rounds that follow; each false alarm below 1e-6."""
    seed, length = torch.arange(100_000), torch.full((100_000,), 5)
    u = [uniform(fresh_seed(seed, length, stream)) for stream in (DRAFT, ACCEPT, EMIT)]
    u.append(uniform(fresh_seed(seed, length + 1, DRAFT)))
    for a in range(4):
        for b in range(a):
            cells = ((u[a] * 8).long() * 8 + (u[b] * 8).long()).bincount(minlength=64)
            assert scipy.stats.chisquare(cells.numpy()).pvalue > 1e-6
