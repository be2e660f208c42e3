"""The round, on the device: draft, grant, verify, accept, roll back, for every running row at once.

Tensors in, tensors out, the rows updated in place. Its shapes depend on `RoundShape` alone and it reads nothing back
to the host, so one shape is one CUDA graph; it says nothing about where a sequence came from or goes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.draft import Draft, Drafter, DraftRows, as_draft
from specdec.model import Packed, PagedModel, slots
from specdec.rows import Rows, RowView
from specdec.verify import Accepted, Verification, Verifier


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What the host decides about a round. draft_steps: drafts per row at most, 0 is plain decoding.

    tokens: the token bucket, at least the number of rows; the best drafts fill it. None, where the device is the host
    (CPU): exactly the tokens that are wanted, so that nothing is padded. noise, filters: see RowView.
    """

    draft_steps: int
    tokens: int | None
    noise: bool
    filters: bool


@dataclass
class RoundResult:
    """What a round emitted, on the device. B rows in the order of the round's index.

    values [B, len(COLUMNS) + draft_steps + 1] int64, one tensor so that one copy brings it to the host: first the
    COLUMNS (num_accepted: before a cut at a stop id; num_wanted: drafts there would have been had the bucket held
    them; ran, finished, failed: 0 or 1), then the emitted token ids, padded with -1.
    """

    values: Tensor

    COLUMNS: ClassVar = (
        "num_emitted",
        "num_drafts",
        "num_accepted",
        "num_wanted",
        "drafter_len",
        "ran",
        "finished",
        "failed",
    )


class DrafterFailed(RuntimeError):
    """A drafter raised, or returned something that is no draft. The rows are as they were before the round."""

    def __init__(self, error: Exception):
        super().__init__(repr(error))
        self.error = error


class Round:
    """The parts of a round: rows, the target, a drafter or none, a verifier."""

    def __init__(self, rows: Rows, target: PagedModel, drafter: Drafter | None, verifier: Verifier):
        self.rows, self.target, self.drafter, self.verifier = rows, target, drafter, verifier

    @torch.inference_mode()
    def run(self, index: Tensor, shape: RoundShape) -> RoundResult:
        """One round of the rows `index` [B] int64 (-1: padding)."""
        view = self.rows.view(index, noise=shape.noise, filters=shape.filters)
        running, want = room(view, self.rows, shape.draft_steps)
        draft = self._propose(view, running, want, shape.draft_steps)
        num_drafts = grant(draft, running, shape.tokens)
        verification = pack(view, running, draft, num_drafts, self._bucket(running, num_drafts, shape))
        logits = self.target.extend(verification.packed)
        accepted = self.verifier.accept(logits, verification, draft, view)
        return self._roll_back(view, verification, draft, accepted)

    def _propose(self, view: RowView, running: Tensor, want: Tensor, k: int) -> Draft:
        batch = len(want)
        if self.drafter is None or k == 0:
            return Draft(want.new_zeros(batch, k), torch.zeros_like(want))
        rows = DraftRows(view.history, view.num_tokens, want, running, view.sampling, view)
        try:
            draft = as_draft(self.drafter.propose(rows, k), batch, k)
        except Exception as error:
            raise DrafterFailed(error) from error
        draft.counts = torch.minimum(draft.counts.to(want.device, torch.int64).clamp(min=0), want)
        draft.token_ids = draft.token_ids.to(want.device, torch.int64)
        legal = (draft.token_ids >= 0) & (draft.token_ids < self.target.vocab_size)
        draft.counts = torch.minimum(draft.counts, legal.long().cumprod(1).sum(1))
        return draft

    def _bucket(self, running: Tensor, num_drafts: Tensor, shape: RoundShape) -> int:
        if shape.tokens is not None:
            return shape.tokens
        # Only where the device is the host: this look costs nothing there, and padding would cost a row of every layer.
        return max(1, int((num_drafts + running).sum()))

    def _roll_back(self, view: RowView, verification: Verification, draft: Draft, accepted: Accepted) -> RoundResult:
        """Move the rows past what was emitted. Nothing is copied: rejected KV lies past the end, to be overwritten."""
        rows, l = self.rows, view.num_tokens
        emitted = accepted.num_emitted
        depth = torch.arange(accepted.token_ids.shape[1], device=l.device)
        where = torch.where(depth < emitted[:, None], l[:, None] + depth, rows.max_len)
        rows.history.index_put_((view.index[:, None], where), accepted.token_ids.int())
        num_tokens = l + emitted
        drafter_len = view.drafter_len
        if draft.written is not None:
            written = draft.written
            drafter_len = torch.where(written > 0, torch.minimum(num_tokens - 1, l + written - 1), drafter_len)
        finished = verification.running & (accepted.ended | accepted.failed | (num_tokens >= view.limit))
        rows.num_tokens[view.index] = num_tokens
        rows.drafter_len[view.index] = drafter_len
        rows.active[view.index] = view.active & ~finished
        counts = (emitted, verification.num_drafts, accepted.num_accepted, draft.counts, drafter_len)
        flags = (verification.running, finished, accepted.failed)
        columns = torch.stack([c.long() for c in (*counts, *flags)], 1)
        return RoundResult(torch.cat([columns, accepted.token_ids.long()], 1))


def room(view: RowView, rows: Rows, draft_steps: int) -> tuple[Tensor, Tensor]:
    """Which rows run [B] bool, and how many drafts each may use [B] int64.

    A row without a slot for its newest token stalls: it emits nothing and writes nothing. So reserving blocks ahead
    changes speed, never the output; under pressure drafts shrink first.
    """
    l = view.num_tokens
    reserved = rows.block_size * (view.block_table >= 0).sum(1)
    running = view.active & (l - 1 < reserved)
    space = torch.minimum(torch.minimum(view.limit - l - 1, reserved - l), rows.max_len - l)
    want = torch.minimum(view.k, space).clamp(min=0, max=draft_steps)
    return running, torch.where(running, want, 0)


def grant(draft: Draft, running: Tensor, tokens: int | None) -> Tensor:
    """[B] drafts of each row that enter the bucket of `tokens`: the best scores, always a prefix of the row.

    Depth-major order and a stable sort share ties fairly, and keep prefixes whole for any non-increasing score.
    """
    batch, k = draft.token_ids.shape
    if k == 0 or tokens is None or tokens >= batch * (k + 1):
        return draft.counts
    device = draft.counts.device
    valid = torch.arange(k, device=device) < draft.counts[:, None]
    score = torch.zeros(batch, k, device=device) if draft.scores is None else draft.scores.float()
    order = torch.where(valid, score, -torch.inf).t().flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(batch * k, device=device))
    granted = (rank < tokens - running.sum()).view(k, batch).t() & valid
    return granted.long().cumprod(1).sum(1)


def pack(view: RowView, running: Tensor, draft: Draft, num_drafts: Tensor, tokens: int) -> Verification:
    """Lay the rows' newest tokens and granted drafts one after another in a bucket of `tokens`, ragged.

    Row r has num_drafts[r] + 1 query tokens at positions l - 1 .. l - 1 + num_drafts[r]; padding writes nothing.
    """
    l, batch = view.num_tokens, len(running)
    width = torch.where(running, num_drafts + 1, 0)
    ends = width.cumsum(0)
    at = torch.arange(tokens, device=l.device)
    row = torch.searchsorted(ends, at, right=True)
    valid = row < batch
    row = row.clamp(max=batch - 1)
    offset = at - (ends - width)[row]
    positions = torch.where(valid, l[row] - 1 + offset, 0)
    ids = torch.cat([view.newest()[:, None], draft.token_ids], 1)[row, torch.where(valid, offset, 0)]
    packed = Packed(
        token_ids=torch.where(valid, ids, 0),
        positions=positions,
        slot_mapping=slots(view.block_table, row, positions, valid, view.block_size),
        block_table=view.block_table,
        seq_lens=torch.where(running, l + num_drafts, 0).int(),
        cu_seqlens_q=torch.nn.functional.pad(ends, (1, 0)).int(),
        max_seqlen_q=draft.token_ids.shape[1] + 1,
    )
    return Verification(packed, row, num_drafts, running)
