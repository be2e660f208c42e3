"""What the round's small kernels read and write: columns of tensors, one entry per row."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class RowState(NamedTuple):
    """What a round changes, for all rows of the engine: num_tokens, drafter_len [rows] int64, active [rows] bool."""

    num_tokens: Tensor
    drafter_len: Tensor
    active: Tensor


class View(Protocol):
    """The rows of one round, gathered, B of them: index [B] int64, where each is among all rows; its columns int64 [B],
    active bool; block_table [B, M] int32, -1 past the reservation; all_tokens [rows, max_len + 1] int32 is not gathered.
    """

    index: Tensor
    num_tokens: Tensor
    drafter_len: Tensor
    k: Tensor
    limit: Tensor
    active: Tensor
    block_table: Tensor
    all_tokens: Tensor
    block_size: int
    max_len: int


PENALTIES, BIAS, BANS = 1, 2, 4
"""Bits of `Adjustments.flags`: which of its parts a row has."""


class Adjustments(NamedTuple):
    """What rows want done to their logits before a token is drawn, an entry for each of the engine's rows.

    flags [rows] int64; repetition, presence, frequency [rows] fp32; counts [rows, V] int32, twice the times that a
    token is in the row's output, odd if it is in its prompt; bias [rows, V] fp32, added; bans [rows, words, length]
    int32, tokens that may not follow one another, to the right, -1 before their first; until [rows, words] int64: a ban
    holds at positions below, 0 for none.
    """

    flags: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    counts: Tensor
    bias: Tensor
    bans: Tensor
    until: Tensor


class Known(Protocol):
    """What `adjust` reads of a round's rows: see View."""

    index: Tensor
    num_tokens: Tensor
    all_tokens: Tensor


class PackedTokens(NamedTuple):
    """token_ids, positions, slot_mapping, row [N] int64; seq_lens [B], cu_seqlens_q [B + 1] int32."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    row: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor


class DraftStep(NamedTuple):
    """token_ids, positions, slot_mapping [B * n] int64; seq_lens [B], cu_seqlens_q [B + 1] int32; drawn_at [B] int64,
    the position of the token that the step's last logits draw.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    drawn_at: Tensor


class Settled(NamedTuple):
    """What a round decided: token_ids [B, k + 1] int64; the counts int64 [B]; running, ended, failed bool [B];
    written [B] int64, positions whose drafter KV the round wrote from l - 1 on, or None.
    """

    token_ids: Tensor
    num_emitted: Tensor
    num_accepted: Tensor
    num_drafts: Tensor
    num_wanted: Tensor
    running: Tensor
    ended: Tensor
    failed: Tensor
    written: Tensor | None
