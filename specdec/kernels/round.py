"""The steps of a round that are no model's, each one launch: from the rows' columns to packed tokens and back.

On a CPU their torch twins run. They serve `specdec.round` and the model drafter, which say why each step is there; they
take columns that those have made, and check nothing.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.backend import on_device, use_triton
from specdec.kernels.columns import DraftStep, PackedTokens, RowState, Settled, View
from specdec.kernels.reference import round as reference
from specdec.kernels.reference.round import slots
from specdec.kernels.round_kernel import (
    draft_depth_kernel,
    draft_step_kernel,
    gather_kernel,
    grant_kernel,
    legal_kernel,
    pack_kernel,
    room_kernel,
    settle_kernel,
)

__all__ = ["draft_depth", "draft_step", "gather_rows", "grant", "legal", "pack", "room", "settle", "slots"]

NUM_COLUMNS = 8
"""Counts and flags in front of the tokens that `settle` returns."""


def gather_rows(
    index: Tensor, state: RowState, ints: Tensor, floats: Tensor, table: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The columns of the rows `index` [B] int64; -1 shows the last row of all.

    ints [I, rows] int64, floats [F, rows] fp32, table [rows, M] int32. Returns columns [3 + I, B] int64: the rows' own
    numbers, num_tokens, drafter_len, then `ints`; active [B]; floats [F, B]; tables [B, M].
    """
    batch, total = len(index), table.shape[0]
    if not use_triton(index):
        row = torch.where(index < 0, total - 1, index)
        numbers = torch.stack([row, state.num_tokens[row], state.drafter_len[row]])
        return torch.cat([numbers, ints[:, row]]), state.active[row], floats[:, row], table[row]
    columns = ints.new_empty(3 + len(ints), batch)
    active, parameters = state.active.new_empty(batch), floats.new_empty(len(floats), batch)
    tables = table.new_empty(batch, table.shape[1])
    with on_device(index):
        gather_kernel[(batch,)](
            index, *state, ints, floats, table, columns, active, parameters, tables, batch, total, table.shape[1],
            NUM_INTS=len(ints), NUM_FLOATS=len(floats), COLUMNS=16, BLOCK=256, num_warps=1,
        )  # fmt: skip
    return columns, active, parameters, tables


def room(view: View, draft_steps: int) -> tuple[Tensor, Tensor]:
    """Which rows run [B] bool, and how many drafts each may use [B] int64: see `specdec.round`."""
    if not use_triton(view.index):
        return reference.room(view, draft_steps)
    running, want = torch.empty_like(view.active), torch.empty_like(view.num_tokens)
    table = view.block_table
    with on_device(table):
        room_kernel[(len(want),)](
            view.num_tokens, view.active, view.limit, view.k, table, running, want,
            table.shape[1], table.stride(0), view.block_size, view.max_len, draft_steps, BLOCK=256, num_warps=1,
        )  # fmt: skip
    return running, want


def legal(token_ids: Tensor, counts: Tensor, want: Tensor, vocab_size: int) -> Tensor:
    """[B] int64: how many of a row's drafts [B, k] it wants and may use, a prefix of ids below `vocab_size`."""
    if not use_triton(want):
        return reference.legal(token_ids, counts, want, vocab_size)
    batch, k = token_ids.shape
    out = torch.empty_like(want)
    with on_device(want):
        legal_kernel[(triton.cdiv(batch, 32),)](
            token_ids, counts, want, out, batch, k, *token_ids.stride(), vocab_size,
            ROWS=32, BLOCK=triton.next_power_of_2(k), num_warps=1,
        )  # fmt: skip
    return out


def grant(counts: Tensor, scores: Tensor, running: Tensor, tokens: int) -> Tensor:
    """[B] int64: the drafts of each row that enter a bucket of `tokens`, which also holds a token of every running row.

    counts [B] int64, scores [B, k] float: the best scores first; of equals the shallower, then the earlier row.
    """
    if not use_triton(counts):
        return reference.grant(counts, scores, running, tokens)
    batch, k = scores.shape
    out = torch.empty_like(counts)
    with on_device(counts):
        grant_kernel[(batch,)](
            counts, scores, running, out, batch, k, *scores.stride(), tokens,
            BLOCK_B=triton.next_power_of_2(batch), BLOCK_K=triton.next_power_of_2(k), BLOCK=256, num_warps=4,
        )  # fmt: skip
    return out


def pack(view: View, running: Tensor, drafts: Tensor, num_drafts: Tensor, tokens: int) -> PackedTokens:
    """The rows' newest tokens and granted drafts [B, k], one after another in a bucket of `tokens`; see `specdec.round`."""
    if not use_triton(running):
        return reference.pack(view, running, drafts, num_drafts, tokens)
    batch, long = len(running), view.num_tokens
    ids, positions, slot_mapping, row = long.new_empty(4, tokens)
    packed = PackedTokens(ids, positions, slot_mapping, row, *_lengths(batch, long))
    table = view.block_table
    with on_device(table):
        pack_kernel[(triton.cdiv(tokens, 32),)](
            view.index, long, running, num_drafts, drafts, view.all_tokens, table, *packed, batch, tokens,
            *drafts.stride(), view.all_tokens.stride(0), table.stride(0), table.shape[1], view.block_size,
            BLOCK_B=triton.next_power_of_2(batch), BLOCK=32, num_warps=4,
        )  # fmt: skip
    return packed


def draft_depth(view: View, running: Tensor, want: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """How many drafts a draft model makes for each row, and how many steps it runs, int64 [B].

    A row whose drafter KV ends more than `window` tokens before the row does drafts nothing and runs no step.
    """
    if not use_triton(want):
        return reference.draft_depth(view, running, want, window)
    counts, depth = torch.empty_like(want), torch.empty_like(want)
    with on_device(want):
        draft_depth_kernel[(triton.cdiv(len(want), 64),)](
            view.num_tokens, view.drafter_len, running, want, counts, depth, len(want), window, BLOCK=64, num_warps=2
        )
    return counts, depth


def draft_step(view: View, depth: Tensor, previous: Tensor | None, j: int, window: int, vocab_size: int) -> DraftStep:
    """The tokens of step j of a draft model, for every row: see `specdec.draft.model`.

    depth [B] int64: steps that a row runs; previous [B] int64: what step j - 1 drew, None at step 0, which runs each
    row's last `window` tokens and writes those that the drafter lacks. Ids that the drafter does not know become 0.
    """
    if not use_triton(depth):
        return reference.draft_step(view, depth, previous, j, window, vocab_size)
    batch, long, n = len(depth), view.num_tokens, window if previous is None else 1
    ids, positions, slot_mapping = long.new_empty(3, batch * n)
    step = DraftStep(ids, positions, slot_mapping, *_lengths(batch, long), torch.empty_like(long))
    table = view.block_table
    with on_device(table):
        draft_step_kernel[(triton.cdiv(batch + 1, 64),)](
            view.index, long, view.drafter_len, depth, previous, view.all_tokens, table, *step,
            batch, view.all_tokens.stride(0), table.stride(0), table.shape[1], view.block_size, j, vocab_size,
            N=n, BLOCK=64, num_warps=2,
        )  # fmt: skip
    return step


def settle(state: RowState, view: View, settled: Settled) -> Tensor:
    """Move the rows past what was emitted; returns values [B, NUM_COLUMNS + k + 1] int64, as `RoundResult` has them."""
    if not use_triton(view.index):
        return reference.settle(state, view, settled)
    batch, tokens = settled.token_ids.shape
    out = view.num_tokens.new_empty(batch, NUM_COLUMNS + tokens)
    with on_device(out):
        settle_kernel[(batch,)](
            view.index, view.num_tokens, view.drafter_len, view.active, view.limit, view.all_tokens, *state,
            *settled, out, tokens, settled.token_ids.stride(0), view.all_tokens.stride(0),
            COLUMNS=NUM_COLUMNS, BLOCK=triton.next_power_of_2(tokens), num_warps=1,
        )  # fmt: skip
    return out


def _lengths(batch: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Room for seq_lens [B] and cu_seqlens_q [B + 1]."""
    return like.new_empty(batch, dtype=torch.int32), like.new_empty(batch + 1, dtype=torch.int32)
