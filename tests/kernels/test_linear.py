"""Linear layers of a few tokens: the kernels in the interpreter against the twin, and the twin against torch."""

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels import linear
from specdec.kernels.backend import interpreted

SHAPES = [(1, 37, 5), (1, 1030, 3), (2, 64, 64), (7, 100, 130), (8, 1024, 17), (9, 576, 33), (16, 1536, 16)]


def problem(tokens: int, width: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, weight, bias and residual as views into NaN: what lies between rows and past the end must not be read."""
    generator = torch.Generator().manual_seed(tokens)
    x, weight = torch.full((tokens + 1, width + 8), float("nan")), torch.full((rows + 1, width + 3), float("nan"))
    x[:tokens, :width] = torch.randn(tokens, width, generator=generator)
    weight[:rows, :width] = torch.randn(rows, width, generator=generator)
    bias = torch.randn(rows, generator=generator)
    residual = torch.full((tokens + 1, rows + 5), float("nan"))
    residual[:tokens, :rows] = torch.randn(tokens, rows, generator=generator)
    x, weight, bias, residual = x.to(dtype), weight.to(dtype), bias.to(dtype), residual.to(dtype)
    return x[:tokens, :width], weight[:rows, :width], bias, residual[:tokens, :rows]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_twin_is_torchs_linear(shape, bias):
    x, weight, b, _ = problem(*shape)
    torch.testing.assert_close(linear(x, weight, b if bias else None), F.linear(x, weight, b if bias else None))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_its_twin(shape, bias, dtype):
    x, weight, b, _ = problem(*shape, dtype)
    want = linear(x, weight, b if bias else None)
    with interpreted():
        got = linear(x, weight, b if bias else None)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def summed(shape, dtype: torch.dtype, bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A product with its residual in one call, and in two."""
    x, weight, b, residual = problem(*shape, dtype)
    b = b if bias else None
    return linear(x, weight, b, residual), linear(x, weight, b) + residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_twin_with_a_residual_is_the_sum_bit_for_bit(shape, bias, dtype):
    together, apart = summed(shape, dtype, bias)
    assert together.isfinite().all() and torch.equal(together, apart)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 1, 5)])
def test_kernel_with_a_residual_is_the_sum_bit_for_bit(shape, bias, dtype):
    """In fp16 a sum that isn't rounded before the residual is added differs in a quarter of the numbers."""
    with interpreted():
        together, apart = summed(shape, dtype, bias)
    assert together.isfinite().all() and torch.equal(together, apart)


@pytest.mark.interpreter
def test_no_tokens_and_no_rows():
    with interpreted():
        assert linear(torch.ones(0, 4), torch.ones(3, 4)).shape == (0, 3)
        assert linear(torch.ones(2, 4), torch.ones(0, 4), residual=torch.ones(2, 0)).shape == (2, 0)


def test_bad_tensors_are_named():
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.raises(ValueError, match="x: expected at most 16 tokens, got 17"):
        linear(torch.ones(17, 4), weight)
    with pytest.raises(ValueError, match="weight: "):
        linear(x, torch.ones(3, 5))
    with pytest.raises(ValueError, match="weight: "):
        linear(x, weight.half())
    with pytest.raises(ValueError, match="weight: "):
        linear(x, torch.ones(4, 3).t())
    with pytest.raises(ValueError, match="bias: "):
        linear(x, weight, torch.ones(4))
    for residual in (torch.ones(3), torch.ones(1, 3), torch.ones(2, 4), torch.ones(2, 3).half(), torch.ones(3, 2).t()):
        with pytest.raises(ValueError, match="residual: "):
            linear(x, weight, residual=residual)
