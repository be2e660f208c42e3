"""The torch twin of the acceptance kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def accept(
    tokens: Tensor, drafts: Tensor, num_drafts: Tensor, cu_seqlens_q: Tensor, stop_ids: Tensor, running: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `specdec.kernels.accept.accept`."""
    k = drafts.shape[1]
    depth = torch.arange(k + 1, device=drafts.device)
    at = (cu_seqlens_q[:-1, None] + depth).clamp(max=max(len(tokens) - 1, 0))
    drawn = tokens[at]
    matched = (drafts == drawn[:, :k]) & (depth[:k] < num_drafts[:, None])
    accepted = torch.where(running, matched.long().cumprod(1).sum(1), 0)
    emitted = torch.where(running, accepted + 1, 0)
    nothing = (drawn < 0) & (depth < emitted[:, None])
    stops = (drawn[:, :, None] == stop_ids[:, None]).any(-1) & (drawn >= 0) & (depth < emitted[:, None])
    first_nothing = torch.where(nothing, depth, k + 1).amin(1)
    first_stop = torch.where(stops, depth, k + 1).amin(1)
    emitted = torch.minimum(torch.minimum(emitted, first_nothing), first_stop + 1)
    ended = first_stop < emitted
    failed = (first_nothing <= k) & ~ended
    out = torch.where(depth < emitted[:, None], drawn, -1)
    return out, emitted, accepted, ended, failed
