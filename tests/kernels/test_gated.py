"""Products with a gated activation: the kernels in the interpreter against the twin, and the twin against torch."""

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels import gated_linear, linear
from specdec.kernels.backend import interpreted

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # as meant: a closed gate

SHAPES = [(1, 37, 5), (1, 1030, 3), (2, 64, 64), (7, 100, 65), (8, 1024, 17), (9, 576, 33), (16, 1536, 8)]
"""Tokens, width, and outputs: half as many as the weight has rows."""

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def problem(tokens: int, width: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, weight and bias as views into NaN: what lies between rows and past the end must not be read."""
    generator = torch.Generator().manual_seed(tokens)
    x, weight = torch.full((tokens + 1, width + 8), float("nan")), torch.full((2 * inner + 1, width + 3), float("nan"))
    x[:tokens, :width] = torch.randn(tokens, width, generator=generator)
    weight[: 2 * inner, :width] = torch.randn(2 * inner, width, generator=generator) * 4 * width**-0.5
    bias = torch.full((2 * inner + 1,), float("nan"))
    bias[: 2 * inner] = torch.randn(2 * inner, generator=generator)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    return x[:tokens, :width], weight[: 2 * inner, :width], bias[: 2 * inner]


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_twin_rounds_the_product_and_then_the_result(shape, bias, dtype, activation, gate_first):
    x, weight, b = problem(*shape, dtype)
    b = b if bias else None
    first, second = linear(x, weight, b).float().chunk(2, -1)
    gate, up = (first, second) if gate_first else (second, first)
    got = gated_linear(x, weight, b, activation, gate_first)
    assert got.isfinite().all() and torch.equal(got, (ACTIVATIONS[activation](gate) * up).to(dtype))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "activation, gate_first", [("silu", True), ("silu", False), ("gelu", True), ("gelu_tanh", False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_its_twin(shape, bias, dtype, activation, gate_first):
    x, weight, b = problem(*shape, dtype)
    b = b if bias else None
    want = gated_linear(x, weight, b, activation, gate_first)
    with interpreted():
        got = gated_linear(x, weight, b, activation, gate_first)
    assert got.shape == want.shape and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_linear_and_then_silu_bit_for_bit(shape):
    """In fp16 sums that aren't rounded before the activation differ in a third of the numbers."""
    x, weight, bias = problem(*shape, torch.float16)
    with interpreted():
        got, (gate, up) = gated_linear(x, weight, bias), linear(x, weight, bias).float().chunk(2, -1)
    assert torch.equal(got, (gate / (torch.exp(-gate) + 1) * up).half())


@pytest.mark.interpreter
def test_a_gate_far_below_zero_is_closed():
    """exp(-gate) is infinite in fp32 then."""
    weight = torch.tensor([[-100.0, 0.0], [0.0, 3.0]])
    with interpreted():
        assert gated_linear(torch.ones(1, 2), weight).tolist() == [[0.0]]
        assert gated_linear(torch.ones(3, 2), weight, activation="gelu_tanh").tolist() == [[0.0]] * 3


@pytest.mark.interpreter
def test_a_single_column_no_tokens_and_no_rows():
    with interpreted():
        x, weight, bias = problem(3, 1, 5, torch.float32)
        assert gated_linear(x, weight, bias).isfinite().all()
        assert gated_linear(torch.ones(0, 4), torch.ones(6, 4)).shape == (0, 3)
        assert gated_linear(torch.ones(2, 4), torch.ones(0, 4)).shape == (2, 0)


def test_bad_arguments_are_named():
    x, weight = torch.ones(2, 4), torch.ones(6, 4)
    with pytest.raises(ValueError, match="x: expected at most 16 tokens, got 17"):
        gated_linear(torch.ones(17, 4), weight)
    with pytest.raises(ValueError, match="weight: expected an even number of rows, got 5"):
        gated_linear(x, weight[:5])
    for wrong in (torch.ones(6, 5), weight.half(), torch.ones(4, 6).t()):
        with pytest.raises(ValueError, match="weight: "):
            gated_linear(x, wrong)
    with pytest.raises(ValueError, match="bias: "):
        gated_linear(x, weight, torch.ones(3))
    with pytest.raises(ValueError, match="activation: expected one of silu, gelu, gelu_tanh, got relu"):
        gated_linear(x, weight, activation="relu")
