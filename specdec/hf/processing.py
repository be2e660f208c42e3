"""Logits processors within a round: the verifier that scores pass through before it draws.

Processors see whole batches of one length, while rows of a round stand at several. So they are called once for every
length that has a token to draw, with the batch as transformers would have it there; rows that are elsewhere fill it up
and their scores are dropped. What a processor returns must be a function of its arguments alone, and a row's scores of
that row alone: it is asked about drafts that may be rejected, and its neighbours may not have got there yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.draft import Draft
from specdec.hf.call import Call
from specdec.hf.kept import Kept
from specdec.model import device_of
from specdec.rows import RowView
from specdec.sequence import Sequence
from specdec.verify import Accepted, Verification, Verifier


class ProcessedVerifier:
    """`inner` on processed logits. placed: the engine's sequence in each row, None for a free one."""

    def __init__(self, inner: Verifier, call: Call, seqs: list[Sequence], placed: list[Sequence | None]):
        self.inner, self.processors, self.placed, self.kept = inner, call.processors, placed, Kept(call)
        self._member = {seq: b for b, seq in enumerate(seqs)}
        self._padding = torch.tensor(call.padding, device=device_of(call.model))
        width = call.input_ids.shape[1]
        self._batch = call.input_ids.new_full((len(seqs), width + call.new_tokens), call.pad_id)
        self._batch[:, :width] = call.input_ids
        self._batch = self._batch.to(device_of(call.model))

    def accept(self, logits: Tensor, verification: Verification, draft: Draft, view: RowView) -> Accepted:
        """logits [N, vocab] of the packed tokens."""
        return self.inner.accept(self._process(logits, verification, view), verification, draft, view)

    def _process(self, logits: Tensor, verification: Verification, view: RowView) -> Tensor:
        """[N, vocab] fp32. Reads lengths back to the host, so such rounds are not captured."""
        packed, count = verification.packed, int(verification.packed.cu_seqlens_q[-1])
        members = torch.tensor([self._member_of(row) for row in view.index.tolist()], device=logits.device)
        member = members[verification.row[:count]]
        columns = self._padding[member] + packed.positions[:count]
        batch = self._known(view, members)
        batch[member, columns] = packed.token_ids[:count]
        processed, positions = logits.float(), packed.positions[:count]
        self.kept.note("logits", processed[:count], member, positions)
        for length in columns.unique().tolist() if self.processors else ():
            here = (columns == length).nonzero()[:, 0]
            scores = processed.new_zeros(len(batch), processed.shape[1])
            scores[member[here]] = processed[here]
            processed[here] = self._asked(batch[:, : length + 1], scores)[member[here]]
        self.kept.note("scores", processed[:count], member, positions)
        return processed

    def _asked(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, vocab] in fp32: what the processors make of `scores`."""
        out = self.processors(input_ids, scores)
        if not isinstance(out, Tensor) or out.shape != scores.shape:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"logits_processor: expected scores of shape {list(scores.shape)} back, got {got}")
        return out.to(scores)

    def _known(self, view: RowView, members: Tensor) -> Tensor:
        """[B, L + new] the batch with what each row of the round has so far, at the columns it has in transformers."""
        batch, width = self._batch.clone(), view.history.shape[1]
        columns = torch.arange(batch.shape[1], device=batch.device)
        present = (members >= 0).nonzero()[:, 0]
        member = members[present]
        positions = columns - self._padding[member][:, None]
        tokens = view.history[present].long().gather(1, positions.clamp(0, width - 1))
        known = (positions >= 0) & (positions < view.num_tokens[present][:, None])
        batch[member] = torch.where(known, tokens, batch[member])
        return batch

    def _member_of(self, row: int) -> int:
        seq = self.placed[row] if row < len(self.placed) else None
        return -1 if seq is None else self._member.get(seq, -1)
