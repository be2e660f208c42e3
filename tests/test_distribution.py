"""Log weights: the distribution that the sampler draws from, filter for filter."""

import pytest
import torch

from specdec.distribution import log_weights, unfiltered
from specdec.kernels import Sampling, sample


def columns(count, generator):
    def some(off, values):
        return torch.where(torch.rand(count, generator=generator) < 0.4, off, values)

    unit = torch.rand(3, count, generator=generator)
    return Sampling(
        temperature=unit[0] * 2 + 0.1,
        top_k=some(0.0, (unit[1] * 20).ceil()).long(),
        top_p=some(1.0, unit[1].clamp(min=0.01)),
        min_p=some(0.0, unit[2]),
        seed=torch.arange(count),
    )


@pytest.mark.parametrize("size", [1, 3, 130, 700])
def test_draws_are_the_samplers_own(size):
    """With the same noise, a draw from the log weights is the draw from the logits: same survivors, same scores."""
    g = torch.Generator().manual_seed(size)
    logits = torch.randn(300, size, generator=g) * 3
    logits[:, : size // 3] = logits[:, size // 3 : size // 3 * 2]  # ties
    sampling, at = columns(300, g), torch.arange(300)
    weights = log_weights(logits, sampling)
    assert torch.equal(sample(weights, at, unfiltered(sampling.seed)), sample(logits, at, sampling))
    assert (weights.amax(1) == 0).all()


def test_probabilities_are_softmax_without_filters():
    logits = torch.randn(5, 50)
    sampling = unfiltered(torch.arange(5))._replace(temperature=torch.full((5,), 0.7))
    got = log_weights(logits, sampling, filters=False).softmax(1)
    torch.testing.assert_close(got, (logits / 0.7).softmax(1), rtol=1e-5, atol=1e-7)


def test_greedy_rows_are_point_masses_and_rows_of_nothing_are_nan():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, float("nan"), 1.0], [-torch.inf] * 3, [1.0, torch.inf, 2.0]])
    greedy = unfiltered(torch.arange(4))._replace(temperature=torch.tensor([0.0, 0.0, 1.0, 1.0]))
    weights = log_weights(logits, greedy)
    assert weights[0].tolist() == [-torch.inf, 0.0, -torch.inf]
    assert weights[1:3].isnan().all()
    assert weights[3].tolist() == [-torch.inf, 0.0, -torch.inf]  # as the sampler has it
