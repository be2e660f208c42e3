"""Joining attention over two sets of keys into attention over both."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.check import FLOATS, check


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention over the keys of a and of b together, each query having seen the two apart.

    out_a, out_b [T, Hq, Dv] and lse_a, lse_b [T, Hq] fp32, natural log, as `paged_attention` returns them. A half without
    keys (lse -inf) adds nothing; two of them give 0 and -inf. Sinks belong in one of the halves only. Plain torch,
    any device, and fp32 inside. The rule is that of Ye et al., 2024 (cascade inference). Raises ValueError for shapes that
    differ.
    """
    check("out_b", out_b, out_a.shape, FLOATS, out_a.device)
    check("lse_a", lse_a, out_a.shape[:-1], (torch.float32,), out_a.device)
    check("lse_b", lse_b, out_a.shape[:-1], (torch.float32,), out_a.device)
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == float("-inf"), 0)
    weight_a, weight_b = (torch.exp(half - base)[..., None] for half in (lse_a, lse_b))
    out = out_a.float() * weight_a + out_b.float() * weight_b
    return out.to(out_a.dtype), lse
