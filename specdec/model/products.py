"""Linear layers of a paged forward, for few tokens: kernels of our own on a GPU, and on a CPU the weight first.

On a GPU a library's kernels for few tokens reach 84 to 87 % of the copy bandwidth in an 8B layer, ours 91 to 94. On a CPU
BLAS treats tokens @ weight.T with 2 to 16 tokens as a product with tall operands and takes two to four times as long as
for one, where reading the weight once should be most of the cost. weight @ tokens.T costs about the same for 1 to 4 tokens
in BLAS and for 1 to 8 in oneDNN, which takes two thirds of BLAS's time up to some 64: that is what makes verifying several
drafts, of several rows, worth while. All measured in docs/results.md.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from specdec import kernels
from specdec.kernels.linear import MOST_TOKENS
from specdec.model import attention

_ONEDNN: Any = (
    torch.ops.mkldnn._linear_pointwise
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)
"""oneDNN's linear for fp32, which F.linear gives to BLAS: what torch.compile calls on a CPU, there is no public name."""

BLAS_WIDTHS = (1, 2, 4) if _ONEDNN else (1, 2, 4, 5, 8, 16)
WIDTHS = (*BLAS_WIDTHS, *(range(8, 72, 8) if _ONEDNN else ()))
"""Numbers of tokens that products are padded to on a CPU: the fast ones."""

MOST_DEEP = 32
"""Tokens up to which a weight with more columns than rows goes first."""

_HALF = (torch.bfloat16, torch.float16)

few_op = library.custom_op("specdec::linear", kernels.linear, mutates_args=())
"""One opaque operation to the compiler."""


@few_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


gated_op = library.custom_op("specdec::gated_linear", kernels.gated_linear, mutates_args=())
"""The same of a product with its gated activation, which `model/gated.py` puts into compiled layers."""


@gated_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu", gate_first: bool = True
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] @ weight [out, in].T + bias: `torch.nn.functional.linear`, faster for few tokens."""
    tokens = x.numel() // x.shape[-1]
    if x.is_cuda and x.dtype in _HALF and 0 < tokens <= MOST_TOKENS:
        return few_op(x.reshape(tokens, -1), weight, bias).view(*x.shape[:-1], -1)
    if x.is_cuda or x.dtype != torch.float32 or torch.compiler.is_compiling() or not 0 < tokens <= WIDTHS[-1]:
        return F.linear(x, weight, bias)
    return _weight_first(x, weight, bias, tokens)


def _weight_first(x: Tensor, weight: Tensor, bias: Tensor | None, tokens: int) -> Tensor:
    # BLAS runs the product of a single token on one thread, that of two on all.
    width = WIDTHS[bisect_left(WIDTHS, max(tokens, min(2, torch.get_num_threads())))]
    if width == 1 or (width > MOST_DEEP and weight.shape[1] > weight.shape[0]):
        return F.linear(x, weight, bias)
    padded = F.pad(x.reshape(tokens, -1), (0, 0, 0, width - tokens))
    y = torch.mm(weight, padded.t()) if width in BLAS_WIDTHS else _ONEDNN(weight, padded, None, "none", [], "")
    y = y[:, :tokens].t().contiguous()
    return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], -1)


class Product:
    """A linear module whose paged forwards run `linear`; its other forwards stay as they were."""

    def __init__(self, module: nn.Linear):
        self.module = module

    def attach(self) -> None:
        # A bound method, not a closure: a deep copy of the model then gets a forward of its own weights.
        self.module.forward = self._forward  # type: ignore[method-assign, assignment]

    def detach(self) -> None:
        del self.module.forward

    def _forward(self, x: Tensor) -> Tensor:
        product = linear if attention.in_step() else F.linear
        return product(x, self.module.weight, self.module.bias)
