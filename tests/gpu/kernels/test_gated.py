"""Products with a gated activation against fp64, odd sizes and real ones, weights as views into NaN."""

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels import gated_linear
from specdec.kernels.linear import MOST_TOKENS

SHAPES = [(1536, 576), (8192, 2048), (14336, 4096), (500, 14336), (333, 1000), (37, 100), (5, 1)]
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("name, gate_first", [("silu", True), ("silu", False), ("gelu", True), ("gelu_tanh", False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inner, width", SHAPES)
def test_as_in_fp64(inner, width, dtype, name, gate_first):
    """For every number of tokens, and nothing between rows is read."""
    torch.manual_seed(inner)
    padded = torch.full((2 * inner + 1, width + 8), float("nan"), device="cuda", dtype=dtype)
    padded[: 2 * inner, :width] = torch.randn(2 * inner, width, device="cuda") * 2 * width**-0.5
    weight, bias = padded[: 2 * inner, :width], torch.randn(2 * inner, device="cuda").to(dtype)
    for tokens in range(1, MOST_TOKENS + 1):
        x = torch.randn(tokens, width, device="cuda").to(dtype)
        first, second = (x.double() @ weight.double().t() + bias.double()).chunk(2, -1)
        gate, up = (first, second) if gate_first else (second, first)
        want = (ACTIVATIONS[name](gate) * up).to(dtype)
        tolerance = dict(rtol=2e-2, atol=5e-2) if dtype != torch.float32 else dict(rtol=1e-4, atol=5e-4)
        torch.testing.assert_close(gated_linear(x, weight, bias, name, gate_first), want, **tolerance)
