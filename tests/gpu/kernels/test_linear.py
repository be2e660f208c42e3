"""Linear layers of a few tokens against a product in fp64, odd sizes and real ones, weights as views into NaN."""

import pytest
import torch

from specdec.kernels import linear
from specdec.kernels.linear import MOST_TOKENS

SHAPES = [(6144, 4096), (28672, 4096), (1000, 14336), (960, 576), (576, 1536), (333, 1000), (37, 100)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16])
@pytest.mark.parametrize("rows, width", SHAPES)
def test_as_a_product_in_fp64(rows, width, tokens, dtype):
    torch.manual_seed(rows + tokens)
    padded = torch.full((rows + 1, width + 8), float("nan"), device="cuda", dtype=dtype)
    padded[:rows, :width] = torch.randn(rows, width, device="cuda")
    weight = padded[:rows, :width]
    x = torch.randn(tokens, width, device="cuda").to(dtype)
    bias = torch.randn(rows, device="cuda").to(dtype)
    want = (x.double() @ weight.double().t() + bias.double()).to(dtype)
    torch.testing.assert_close(linear(x, weight, bias), want, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows, width", [*SHAPES, (1024, 8192), (5, 1)])
def test_with_a_residual_is_the_sum_bit_for_bit(rows, width, bias, dtype):
    """For every number of tokens; the residual is a view into NaN, with rows further apart than they are long."""
    torch.manual_seed(rows)
    weight, b = torch.randn(rows, width, device="cuda").to(dtype), torch.randn(rows, device="cuda").to(dtype)
    b = b if bias else None
    for tokens in range(1, MOST_TOKENS + 1):
        x = torch.randn(tokens, width, device="cuda").to(dtype)
        padded = torch.full((tokens + 1, rows + 8), float("nan"), device="cuda", dtype=dtype)
        padded[:tokens, :rows] = torch.randn(tokens, rows, device="cuda") * width**0.5
        residual = padded[:tokens, :rows]
        got = linear(x, weight, b, residual)
        assert got.isfinite().all()
        assert torch.equal(got, linear(x, weight, b) + residual)
