"""Compiled on a GPU, a gated activation is the end of the product before it: the same numbers, and no kernel of its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from specdec.kernels.linear import MOST_TOKENS
from specdec.model import products
from specdec.model.layers import _OPTIONS

WITHOUT = {name: option for name, option in _OPTIONS.items() if name != "post_grad_custom_pre_pass"}
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
SIZES = [(576, 1536), (2048, 8192), (4096, 14336), (100, 37), (1000, 333), (8192, 1024)]


def weights(hidden: int, inner: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, gate and up, their bias, down: gates of a standard deviation of 4, of which some are far below zero."""
    torch.manual_seed(hidden + tokens)
    x = torch.randn(1, tokens, hidden, device="cuda").to(dtype)
    gate_up = (torch.randn(2 * inner, hidden, device="cuda") * 4 * hidden**-0.5).to(dtype)
    bias = torch.randn(2 * inner, device="cuda").to(dtype)
    return x, gate_up, bias, (torch.randn(hidden, inner, device="cuda") * inner**-0.5).to(dtype)


def compiled(function, options, *args: Tensor) -> tuple[Tensor, str]:
    torch._dynamo.reset()
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(function, dynamic=False, options=options), *args)
    return got, code


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compiled_mlp_is_two_products(tokens, dtype, name, gate_first):
    act = ACTIVATIONS[name]

    def mlp(x: Tensor, gate_up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        first, second = products.linear(x, gate_up, bias).chunk(2, -1)
        return x + products.linear(act(first) * second if gate_first else first * act(second), down, None)

    args = weights(576, 1536, tokens, dtype)
    got, code = compiled(mlp, _OPTIONS, *args)
    want, other = compiled(mlp, WITHOUT, *args)
    assert got.isfinite().all() and torch.equal(got, want)
    assert code.count("torch.ops.specdec.gated_linear.default(") == 1
    assert code.count("torch.ops.specdec.linear.default(") == 1
    assert "async_compile.triton(" not in code and "async_compile.triton(" in other


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden, inner", SIZES)
def test_same_bits_as_the_compilers_kernel_after_the_product(hidden, inner, dtype, name):
    """For every number of tokens, with a bias and without."""
    torch._dynamo.reset()
    act = ACTIVATIONS[name]
    activate = torch.compile(lambda gate, up: act(gate) * up, dynamic=True, options=WITHOUT)
    for tokens in range(1, MOST_TOKENS + 1):
        x, gate_up, bias, _ = weights(hidden, inner, tokens, dtype)
        for b in (None, bias):
            gate, up = products.few_op(x[0], gate_up, b).chunk(2, -1)
            want = activate(gate.flatten(), up.flatten()).view(tokens, inner)
            got = products.gated_op(x[0], gate_up, b, name)
            assert got.isfinite().all() and torch.equal(got, want)


def test_more_tokens_than_the_kernel_takes_are_the_librarys():
    def mlp(x: Tensor, gate_up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        gate, up = products.linear(x, gate_up, bias).chunk(2, -1)
        return products.linear(F.silu(gate) * up, down, None)

    _, code = compiled(mlp, _OPTIONS, *weights(576, 1536, MOST_TOKENS + 1, torch.bfloat16))
    assert "torch.ops.specdec" not in code
