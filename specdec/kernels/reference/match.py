"""The torch twin of the look-up kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def match(history: Tensor, num_tokens: Tensor, k: int, max_match: int, min_match: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec.kernels.match.match`."""
    last = num_tokens.long()[:, None] - 1  # [R, 1]
    if history.device.type == "cpu":
        history = history[:, : int(last.max()) + 1] if len(last) else history  # the host's own memory: looking is free
    width = history.shape[1]
    ends = torch.arange(width, device=history.device)[None]
    alive = ends < last
    lengths = torch.zeros_like(alive, dtype=torch.int64)
    for i in range(max_match):
        newest = history.gather(1, (last - i).clamp(min=0))
        alive = alive & (ends >= i) & (history.roll(i, 1) == newest)
        if history.device.type == "cpu" and not alive.any():
            break
        lengths += alive
    best = (lengths * width + ends).argmax(1, keepdim=True)  # the longest; of equals the latest
    length = lengths.gather(1, best)[:, 0]
    found = length >= min_match
    # What follows the match, and past the newest token the copied text again: a period of last - best tokens.
    period = (last - best).clamp(min=1)
    at = best + 1 + torch.arange(k, device=history.device) % period
    drafts = history.gather(1, at.clamp(max=width - 1)).long()
    drafts = torch.where(found[:, None], drafts, 0)
    return drafts, torch.where(found, k, 0), torch.where(found, length, 0)
