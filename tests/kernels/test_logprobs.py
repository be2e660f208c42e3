"""Log-probabilities against torch's own."""

import math

import pytest
import torch
from test_sample import logits_of

from specdec.kernels.logprobs import emitted_logprobs, logprobs


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
