"""Products of a paged forward on a CPU: the same numbers as F.linear, for every number of tokens, and only there."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import tiny

from specdec.kvpool import KVPool
from specdec.model import PagedModel
from specdec.model.products import WIDTHS, linear


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [*range(19), *(w + i for w in WIDTHS[-4:] for i in (-1, 0, 1))])
@pytest.mark.parametrize("shape, bias", [((53, 37), False), ((53, 37), True), ((37, 53), True)])
def test_as_linear_for_every_number_of_tokens(tokens, shape, bias, threads):
    generator = torch.Generator().manual_seed(tokens)
    x, weight = torch.randn(1, tokens, shape[1], generator=generator), torch.randn(shape, generator=generator)
    b = torch.randn(shape[0], generator=generator) if bias else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = linear(x, weight, b)
    finally:
        torch.set_num_threads(before)
    assert y.shape == (1, tokens, shape[0])
    assert y.is_contiguous()
    torch.testing.assert_close(y, F.linear(x, weight, b), rtol=1e-5, atol=1e-5)


def test_padding_adds_nothing_to_a_token():
    """A token's row is the same whatever else the padding holds: NaN beside it stays beside it."""
    x = torch.randn(3, 8)
    x[2] = float("nan")
    y = linear(x, torch.randn(5, 8), None)
    assert torch.isfinite(y[:2]).all()
    assert y[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_linears(dtype):
    x, weight = torch.randn(4, 16).to(dtype), torch.randn(8, 16).to(dtype)
    assert torch.equal(linear(x, weight, None), F.linear(x, weight))


def test_a_model_in_use_runs_its_own_forward_and_is_itself_again_afterwards():
    """Outside of `extend` nothing differs, not by a bit; after `close` no forward is replaced."""
    model = copy.deepcopy(tiny("llama"))
    ids = torch.arange(6)[None]
    want = model(ids).logits
    before = {name: "forward" in vars(module) for name, module in model.named_modules()}
    paged = PagedModel(model, KVPool(8, 4), "target")
    assert any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(ids).logits, want)
    paged.close()
    assert {name: "forward" in vars(module) for name, module in model.named_modules()} == before
    assert torch.equal(model(ids).logits, want)
