"""What a layer's attention computes beyond softmax(q k^T) v: the arguments of `paged_attention` that are mostly absent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.check import FP8, check


@dataclass(frozen=True, slots=True)
class Options:
    """Scores are scale * q.k, soft-capped, then biased, then masked; the meaning of each is `paged_attention`'s."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq] fp32
    alibi_slopes: Tensor | None = None  # [Hq] fp32
    causal: bool = True
    tree_mask: Tensor | None = None  # [T, W] int64
    k_scale: Tensor | None = None  # [Hkv] fp32
    v_scale: Tensor | None = None  # [Hkv] fp32

    @property
    def plain(self) -> bool:
        """Whether softmax of scaled and masked products is all there is to it."""
        return self.softcap is None and self.sinks is None and self.alibi_slopes is None


def check_options(options: Options, q: Tensor, num_kv_heads: int, kv_dtype: torch.dtype) -> None:
    """Raise ValueError for what no kernel computes, or can't compute together; q [T, Hq, D]."""
    if not options.scale > 0:
        raise ValueError(f"scale: expected a number > 0, got {options.scale}")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap: expected None or a number > 0, got {options.softcap}")
    if options.window is not None and options.window < 1:
        raise ValueError(f"window: expected None or at least 1 visible key, got {options.window}")
    counts = dict(sinks=q.shape[1], alibi_slopes=q.shape[1], k_scale=num_kv_heads, v_scale=num_kv_heads)
    for name, count in counts.items():
        if (tensor := getattr(options, name)) is not None:
            check(name, tensor, (count,), (torch.float32,), q.device, unit_stride=True)
    if (options.k_scale is not None or options.v_scale is not None) and kv_dtype != FP8:
        raise ValueError(f"k_scale, v_scale: expected {FP8} caches, got {kv_dtype}")
    if options.tree_mask is not None:
        _check_tree(options, q)


def _check_tree(options: Options, q: Tensor) -> None:
    mask = options.tree_mask
    assert mask is not None
    check("tree_mask", mask, (q.shape[0], None), (torch.int64,), q.device, unit_stride=True)
    if not options.causal:
        raise ValueError("tree_mask: expected causal=True (the bits say what a query sees of the new keys), got False")
    if options.alibi_slopes is not None:
        raise ValueError(
            "alibi_slopes: expected None beside a tree_mask (a node's distance isn't in its slot), got a tensor"
        )
    if options.window is not None and options.window < 64 * mask.shape[1]:
        raise ValueError(
            f"window: expected at least {64 * mask.shape[1]} beside a tree_mask of {mask.shape[1]} words, "
            f"got {options.window}"
        )
