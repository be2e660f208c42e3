"""The torch twins of a round's small kernels: what each of them computes, and the path that runs on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.columns import DraftStep, PackedTokens, RowState, Settled, View


def room(view: View, draft_steps: int) -> tuple[Tensor, Tensor]:
    """See `specdec.kernels.round.room`."""
    l = view.num_tokens
    reserved = view.block_size * (view.block_table >= 0).sum(1)
    running = view.active & (l - 1 < reserved)
    space = torch.minimum(torch.minimum(view.limit - l - 1, reserved - l), view.max_len - l)
    want = torch.minimum(view.k, space).clamp(min=0, max=draft_steps)
    return running, torch.where(running, want, 0)


def legal(token_ids: Tensor, counts: Tensor, want: Tensor, vocab_size: int) -> Tensor:
    """See `specdec.kernels.round.legal`."""
    counts = torch.minimum(counts.long().clamp(min=0), want)
    inside = (token_ids >= 0) & (token_ids < vocab_size)
    return torch.minimum(counts, inside.long().cumprod(1).sum(1))


def grant(counts: Tensor, scores: Tensor, running: Tensor, tokens: int) -> Tensor:
    """See `specdec.kernels.round.grant`."""
    batch, k = scores.shape
    valid = torch.arange(k, device=counts.device) < counts[:, None]
    least = torch.finfo(torch.float32).min  # a NaN is worth nothing, and still more than what is no draft
    score = torch.where(valid, scores.float().nan_to_num(nan=least).clamp(min=least), -torch.inf)
    order = score.t().flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(batch * k, device=counts.device))
    granted = (rank < tokens - running.sum()).view(k, batch).t() & valid
    return granted.long().cumprod(1).sum(1)


def pack(view: View, running: Tensor, drafts: Tensor, num_drafts: Tensor, tokens: int) -> PackedTokens:
    """See `specdec.kernels.round.pack`."""
    l, batch = view.num_tokens, len(running)
    width = torch.where(running, num_drafts + 1, 0)
    ends = width.cumsum(0)
    at = torch.arange(tokens, device=l.device)
    row = torch.searchsorted(ends, at, right=True)
    valid = row < batch
    row = row.clamp(max=batch - 1)
    offset = torch.where(valid, at - (ends - width)[row], 0)
    positions = torch.where(valid, l[row] - 1 + offset, 0)
    newest = view.all_tokens[view.index, (l - 1).clamp(min=0)].long()
    ids = torch.cat([newest[:, None], drafts], 1)[row, offset]
    return PackedTokens(
        token_ids=torch.where(valid, ids, 0),
        positions=positions,
        slot_mapping=slots(view.block_table, row, positions, valid, view.block_size),
        row=row,
        seq_lens=torch.where(running, l + num_drafts, 0).int(),
        cu_seqlens_q=F.pad(ends, (1, 0)).int(),
    )


def slots(block_table: Tensor, row: Tensor, positions: Tensor, write: Tensor, block_size: int) -> Tensor:
    """[N] int64 slot of each position in its row's blocks; -1 where `write` is false or the row has no block there.

    block_table [R, M] int32; row, positions [N] int64; write [N] bool.
    """
    entry = (positions // block_size).clamp(max=block_table.shape[1] - 1)
    block = block_table[row, entry].long()
    return torch.where(write & (block >= 0), block * block_size + positions % block_size, -1)


def draft_depth(view: View, running: Tensor, want: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """See `specdec.kernels.round.draft_depth`."""
    synced = running & (view.drafter_len >= view.num_tokens - window)
    return torch.where(synced, want, 0), torch.where(synced, want.clamp(min=1), 0)


def draft_step(view: View, depth: Tensor, previous: Tensor | None, j: int, window: int, vocab_size: int) -> DraftStep:
    """See `specdec.kernels.round.draft_step`."""
    l, n = view.num_tokens, window if previous is None else 1
    live = j < depth
    positions = l[:, None] - n + j + torch.arange(n, device=l.device)
    known = live[:, None] & (positions >= 0)  # a row of one token has no l - 2
    write = known if previous is not None else known & (positions >= view.drafter_len[:, None])
    positions = torch.where(known, positions, 0)
    ids = view.all_tokens[view.index[:, None], positions].long() if previous is None else previous[:, None]
    row = torch.arange(len(l), device=l.device).repeat_interleave(n)
    flat = positions.flatten()
    return DraftStep(
        token_ids=torch.where(known & (ids >= 0) & (ids < vocab_size), ids, 0).flatten(),
        positions=flat,
        slot_mapping=slots(view.block_table, row, flat, write.flatten(), view.block_size),
        seq_lens=torch.where(live, l + j, 0).int(),
        cu_seqlens_q=torch.arange(0, len(l) * n + 1, n, dtype=torch.int32, device=l.device),
        drawn_at=l + j,
    )


def settle(state: RowState, view: View, settled: Settled) -> Tensor:
    """See `specdec.kernels.round.settle`."""
    l, emitted = view.num_tokens, settled.num_emitted
    depth = torch.arange(settled.token_ids.shape[1], device=l.device)
    where = torch.where(depth < emitted[:, None], l[:, None] + depth, view.max_len)
    view.all_tokens.index_put_((view.index[:, None], where), settled.token_ids.int())
    num_tokens, drafter_len = l + emitted, view.drafter_len
    if settled.written is not None:
        written = settled.written
        drafter_len = torch.where(written > 0, torch.minimum(num_tokens - 1, l + written - 1), drafter_len)
    finished = settled.running & (settled.ended | settled.failed | (num_tokens >= view.limit))
    state.num_tokens[view.index] = num_tokens
    state.drafter_len[view.index] = drafter_len
    state.active[view.index] = view.active & ~finished
    counts = (emitted, settled.num_drafts, settled.num_accepted, settled.num_wanted, drafter_len)
    columns = torch.stack([c.long() for c in (*counts, settled.running, finished, settled.failed)], 1)
    return torch.cat([columns, settled.token_ids.long()], 1)
