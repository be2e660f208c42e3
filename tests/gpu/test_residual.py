"""Compiled on a GPU, a residual's sum is the end of the product before it: the same numbers, and no kernel of its own."""

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from specdec.model import products
from specdec.model.layers import _OPTIONS


def layer(x: Tensor, up: Tensor, down: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Two sums, of which the first is the second one's residual, as in a decoder layer."""
    residual = residual + products.linear(x, up, None)
    return residual + products.linear(residual, down, bias)


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_sums_are_the_products(tokens, dtype):
    torch._dynamo.reset()
    torch.manual_seed(tokens)
    shapes = ((1, tokens, 1536), (576, 1536), (576, 576), (576,), (1, tokens, 576))
    args = [torch.randn(shape, device="cuda").to(dtype) * 0.1 for shape in shapes]
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(layer, dynamic=False, options=_OPTIONS), *args)
        want = layer(*args)
    assert torch.equal(got, want)
    assert code.count("torch.ops.specdec.linear.default(") == 2
    assert "async_compile.triton(" not in code
