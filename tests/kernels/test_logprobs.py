"""Log-probabilities and filtered distributions against plain formulas."""

import math

import pytest
import torch
from test_sample import logits_of, make, plain_filter

from specdec.kernels.logprobs import emitted_logprobs, filtered, logprobs


@pytest.mark.parametrize("top", [0, 1, 5])
def test_chosen_and_likeliest(top):
    x, tokens = logits_of(6, 31), torch.tensor([0, 30, 4, 4, 9, 17])
    got = logprobs(x.bfloat16(), tokens, top)
    want = x.bfloat16().double().log_softmax(1)
    assert torch.allclose(got[:, 0], want.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    values, ids = want.topk(top, 1)
    assert torch.equal(got[:, 1 : 1 + top].long(), ids)
    assert torch.allclose(got[:, 1 + top :], values, atol=1e-5)


def test_fewer_tokens_than_asked_for():
    got = logprobs(torch.zeros(1, 3), torch.tensor([2]), 5)
    assert got.shape == (1, 11)
    assert got[0, 6:].tolist() == pytest.approx([-math.log(3)] * 3 + [-math.inf] * 2)


def test_emitted_tokens_of_a_padded_ragged_round():
    """Rows of 2, 1 and 3 packed tokens, and padding that says it is the last row's; -1 past what was emitted."""
    x = logits_of(8, 11)
    token_ids = torch.tensor([[3, 4, -1], [5, -1, -1], [6, 7, 8]])
    row, ends = torch.tensor([0, 0, 1, 2, 2, 2, 2, 2]), torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    got = emitted_logprobs(x, token_ids, row, ends, 2)
    want = logprobs(x[:6], torch.tensor([3, 4, 5, 6, 7, 8]), 2)
    assert got.shape == (3, 3, 5)
    for (b, j), line in zip(((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)), want, strict=True):
        assert torch.equal(got[b, j], line)


@pytest.mark.parametrize("flat", [True, False])
def test_filters_are_the_samplers(flat):
    x = logits_of(8, 63, scale=0.5 if flat else 3.0)
    x[5:] = (x[5:] * 2).round() / 2  # ties
    params = make(
        8, [1, 0.7, 0.7, 2, 1, 0.9, 0, 1.3], [0, 7, 0, 0, 70, 5, 3, 9], [1, 1, 0.8, 1, 1, 0.6, 0.3, 0.0],
        [0, 0, 0, 0.1, 0, 0.02, 0.5, 0],
    )  # fmt: skip
    order = torch.tensor([3, 0, 6, 1, 7, 2, 5, 4])
    got = filtered(x[order], params, order)
    for line, r in zip(got, order.tolist(), strict=True):
        t, k, p, m, _ = (float(column[r]) for column in params)
        z = x[r] / t if t else x[r]
        kept = plain_filter(x[r], z, int(k), p, m) if t else torch.ones_like(z, dtype=torch.bool)
        assert torch.equal(line > -math.inf, kept)
        assert torch.allclose(line[kept], z[kept])
