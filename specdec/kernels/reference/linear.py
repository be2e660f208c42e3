"""What `linear` computes, in torch operations."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias, summed in fp32."""
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(x.dtype)
