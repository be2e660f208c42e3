"""Linear layers of a paged forward. On a CPU the products of a few tokens run the other way round: weight first.

BLAS treats tokens @ weight.T with 2 to 16 tokens as a product with tall operands and takes two to four times as long as
for one, where reading the weight once should be most of the cost. weight @ tokens.T costs about the same for 1 to 4 tokens
(docs/results.md, "CPU"), which is what makes verifying several drafts worth while.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.model import attention

WIDTHS = (1, 2, 4, 5, 8, 16)
"""Numbers of tokens that products are padded to: the fast ones."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] @ weight [out, in].T + bias: `torch.nn.functional.linear`, faster for few tokens in fp32 on a CPU."""
    tokens = x.numel() // x.shape[-1]
    other = x.is_cuda or x.dtype != torch.float32 or torch.compiler.is_compiling()
    if other or not 0 < tokens <= WIDTHS[-1]:
        return F.linear(x, weight, bias)
    # BLAS runs the product of a single token on one thread, that of two on all.
    width = WIDTHS[bisect_left(WIDTHS, max(tokens, min(2, torch.get_num_threads())))]
    if width == 1:
        return F.linear(x, weight, bias)
    padded = F.pad(x.reshape(tokens, -1), (0, 0, 0, width - tokens))
    y = torch.mm(weight, padded.t())[:, :tokens].t().contiguous()
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
