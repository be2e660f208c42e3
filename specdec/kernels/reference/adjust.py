"""The torch twins of the kernels that adjust logits: their definition, and the path that runs on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.columns import BANS, BIAS, PENALTIES, Adjustments, Known


class _Places(NamedTuple):
    """Where rows of logits belong: the position that each is drawn for, its row of the round, its row of the engine."""

    position: Tensor
    b: Tensor
    row: Tensor


def adjust(
    logits: Tensor,
    positions: Tensor,
    adjustments: Adjustments,
    known: Known,
    drafts: Tensor,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """See `specdec.kernels.adjust.adjust`."""
    count, batch = len(logits), len(known.index)
    out = logits[:, : adjustments.counts.shape[1]].to(torch.float32, copy=True)
    b = torch.arange(count, device=out.device) if rows is None else rows.long()
    b = b.clamp(0, batch - 1)
    positions, row = positions.long(), known.index[b]
    flags = adjustments.flags[row]
    for kind, step in ((PENALTIES, _penalise), (BIAS, _bias), (BANS, _ban)):
        here = ((flags & kind) != 0).nonzero().squeeze(1)
        if here.numel():
            places = _Places(positions[here], b[here], row[here])
            out[here] = step(out[here], places, adjustments, known, drafts)
    return out


def tally(adjustments: Adjustments, index: Tensor, token_ids: Tensor, num_emitted: Tensor) -> None:
    """See `specdec.kernels.adjust.tally`."""
    counts, depth = adjustments.counts, torch.arange(token_ids.shape[1], device=token_ids.device)
    emitted = (depth < num_emitted[:, None]) & (token_ids >= 0) & (token_ids < counts.shape[1])
    emitted &= ((adjustments.flags[index] & PENALTIES) != 0)[:, None]
    where = (index[:, None].expand_as(token_ids)[emitted], token_ids[emitted])
    counts.index_put_(where, torch.full_like(where[0], 2, dtype=counts.dtype), accumulate=True)


def _penalise(x: Tensor, at: _Places, a: Adjustments, known: Known, drafts: Tensor) -> Tensor:
    seen, k = a.counts[at.row][:, : x.shape[1]], drafts.shape[1]
    before = torch.arange(k, device=x.device) < (at.position - known.num_tokens[at.b])[:, None]
    tokens = drafts[at.b]
    before &= (tokens >= 0) & (tokens < x.shape[1])
    seen.scatter_add_(1, torch.where(before, tokens, 0), before.to(seen.dtype) * 2)
    penalty = a.repetition[at.row][:, None]
    repeated = torch.where(x < 0, x * penalty, x / penalty)
    x = torch.where(seen > 0, repeated, x)
    x = x - a.frequency[at.row][:, None] * (seen >> 1).float()
    return x - torch.where(seen > 1, a.presence[at.row][:, None], 0.0)


def _bias(x: Tensor, at: _Places, a: Adjustments, known: Known, drafts: Tensor) -> Tensor:
    return x + a.bias[at.row][:, : x.shape[1]]


def _ban(x: Tensor, at: _Places, a: Adjustments, known: Known, drafts: Tensor) -> Tensor:
    bans = a.bans[at.row].long()  # [T, words, length], each ends at the last place
    length, k = bans.shape[2], drafts.shape[1]
    before = at.position[:, None] - (length - 1) + torch.arange(length - 1, device=x.device)
    tokens = known.all_tokens[at.row[:, None], before.clamp(0, known.all_tokens.shape[1] - 1)].long()
    if k:
        ahead = before - known.num_tokens[at.b][:, None]
        tokens = torch.where(ahead >= 0, drafts[at.b[:, None], ahead.clamp(0, k - 1)], tokens)
    tokens = torch.where(before >= 0, tokens, -2)
    matches = ((bans[:, :, :-1] < 0) | (bans[:, :, :-1] == tokens[:, None])).all(2)
    last = bans[:, :, -1]
    holds = matches & (at.position[:, None] < a.until[at.row]) & (last >= 0) & (last < x.shape[1])
    t, w = holds.nonzero(as_tuple=True)
    x[t, last[t, w]] = -torch.inf
    return x
