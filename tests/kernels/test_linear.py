"""Linear layers of a few tokens: the kernels in the interpreter against the twin, and the twin against torch."""

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels import linear
from specdec.kernels.backend import interpreted

SHAPES = [(1, 37, 5), (1, 1030, 3), (2, 64, 64), (7, 100, 130), (8, 1024, 17), (9, 576, 33), (16, 1536, 16)]


def problem(tokens: int, width: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, weight and bias as views into NaN: what lies between rows and past the end must not be read."""
    generator = torch.Generator().manual_seed(tokens)
    x, weight = torch.full((tokens + 1, width + 8), float("nan")), torch.full((rows + 1, width + 3), float("nan"))
    x[:tokens, :width] = torch.randn(tokens, width, generator=generator)
    weight[:rows, :width] = torch.randn(rows, width, generator=generator)
    bias = torch.randn(rows, generator=generator)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    return x[:tokens, :width], weight[:rows, :width], bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_twin_is_torchs_linear(shape, bias):
    x, weight, b = problem(*shape)
    torch.testing.assert_close(linear(x, weight, b if bias else None), F.linear(x, weight, b if bias else None))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_its_twin(shape, bias, dtype):
    x, weight, b = problem(*shape, dtype)
    want = linear(x, weight, b if bias else None)
    with interpreted():
        got = linear(x, weight, b if bias else None)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.interpreter
def test_no_tokens_and_no_rows():
    with interpreted():
        assert linear(torch.ones(0, 4), torch.ones(3, 4)).shape == (0, 3)
        assert linear(torch.ones(2, 4), torch.ones(0, 4)).shape == (2, 0)


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
