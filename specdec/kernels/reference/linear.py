"""What `linear` and `gated_linear` compute, in torch operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias, summed in fp32; then + residual."""
    y = x.float() @ weight.float().t()
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    return y if residual is None else y + residual


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gate_first: bool) -> Tensor:
    """activation(gate) * up in fp32, of the halves of x [T, in] @ weight [2 I, in].T + bias, rounded before and after."""
    first, second = linear(x, weight, bias, None).float().chunk(2, -1)
    gate, up = (first, second) if gate_first else (second, first)
    return (ACTIVATIONS[activation](gate) * up).to(x.dtype)
