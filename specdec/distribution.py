"""The distribution that `kernels.sample` draws from, as numbers: for verifiers that compare probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels import Sampling
from specdec.kernels.reference.philox import log, weights
from specdec.kernels.reference.sample import MIN_TEMPERATURE


def log_weights(logits: Tensor, sampling: Sampling, *, filters: bool = True) -> Tensor:
    """Log probabilities up to a constant: 0 at a row's maximum, -inf for what the filters drop. [T, V] fp32.

    logits [T, V]; sampling: columns [T]; filters: False promises that no row has one. A greedy row is a point mass on
    its lowest argmax. A row that holds NaN, or nothing above -inf, is NaN throughout.
    """
    x = logits.float()
    greedy, best = torch.full_like(x, -torch.inf), x.argmax(-1, keepdim=True)
    greedy.scatter_(1, best, 0.0)
    peak = x.amax(-1, keepdim=True)
    z = x * sampling.temperature[:, None].clamp(min=MIN_TEMPERATURE).reciprocal()
    top = z.amax(-1, keepdim=True)
    scaled = z - top
    if filters:
        scaled = scaled.masked_fill(~_kept(x, z, top, sampling), -torch.inf)
    point = (sampling.temperature[:, None] <= 0) | (peak == torch.inf)
    return torch.where(peak > -torch.inf, torch.where(point, greedy, scaled), torch.nan)


def unfiltered(seed: Tensor) -> Sampling:
    """Parameters to draw from log weights as they are, seed [T] int64."""
    one, zero = torch.ones_like(seed, dtype=torch.float32), torch.zeros_like(seed)
    return Sampling(temperature=one, top_k=zero, top_p=one, min_p=zero.float(), seed=seed)


def _kept(x: Tensor, z: Tensor, top: Tensor, sampling: Sampling) -> Tensor:
    """[T, V] bool: what passes top-k, then top-p, then min-p; the rules and the arithmetic of `kernels.sample`."""
    size = x.shape[1]
    ordered, order = x.sort(dim=-1, descending=True)
    top_k = sampling.top_k.long()
    top_k = torch.where((top_k > 0) & (top_k < size), top_k, size)[:, None]
    least = ordered.gather(1, top_k - 1)
    mass = weights(z.gather(1, order) - top).where(ordered >= least, 0)
    above = mass.cumsum(1) - mass
    nucleus = (above.double() < mass.sum(1, keepdim=True).double() * sampling.top_p[:, None]) & (mass > 0)
    last = ordered.gather(1, (nucleus.sum(1, keepdim=True) - 1).clamp(min=0))
    least = torch.where(sampling.top_p[:, None] < 1, torch.maximum(least, last), least)
    floor = top + log(sampling.min_p[:, None].clamp(min=1e-30)).clamp(max=0.0)
    return (x >= least) & ((z >= floor) | (sampling.min_p[:, None] <= 0))
