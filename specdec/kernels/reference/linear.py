"""What `linear` computes, in torch operations."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias, summed in fp32; then + residual."""
    y = x.float() @ weight.float().t()
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    return y if residual is None else y + residual
