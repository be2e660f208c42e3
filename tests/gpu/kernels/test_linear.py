"""Linear layers of a few tokens against a product in fp64, odd sizes and real ones, weights as views into NaN."""

import pytest
import torch

from specdec.kernels import linear

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
