"""Controlled acceptance: the real work of every round, then a forced number of accepted drafts.

For cost alone, with weights that mean nothing. Whatever is measured this way has to be labelled "controlled acceptance";
nothing outside the benchmark uses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.draft import Draft, DraftRows
from specdec.kernels import accept, sample
from specdec.rows import RowView
from specdec.verify import Accepted, Verification


class ForcedLength:
    """Verifies as the coupled verifier does, then accepts as many drafts as give a mean of `length` tokens a round."""

    def __init__(self, vocab_size: int, length: float):
        self.vocab_size, self.length = vocab_size, length

    def accept(self, logits: Tensor, verification: Verification, draft: Draft, view: RowView) -> Accepted:
        """See `specdec.verify.Verifier`."""
        packed, row = verification.packed, verification.row
        drawn = sample(
            logits,
            packed.positions + 1,
            view.sampling,
            rows=row,
            noise=view.noise,
            filters=view.filters,
            vocab_size=self.vocab_size,
        )
        if draft.token_ids.shape[1]:
            drawn = self._force(drawn, verification, draft, view)
        starts, running = packed.cu_seqlens_q, verification.running
        return Accepted(*accept(drawn, draft.token_ids, verification.num_drafts, starts, view.stop_ids, running))

    def _force(self, drawn: Tensor, verification: Verification, draft: Draft, view: RowView) -> Tensor:
        """`drawn` [N] with the first few positions of each row equal to its drafts, and the next one different."""
        packed, row = verification.packed, verification.row
        mean = self.length - 1
        dice = mixed(view.num_tokens * 65537 + view.index) % 1000  # varies by row and round
        keep = int(mean) + (dice < 1000 * (mean - int(mean))).long()
        depth = torch.arange(len(drawn), device=drawn.device) - packed.cu_seqlens_q[row]
        at = draft.token_ids[row, depth.clamp(0, draft.token_ids.shape[1] - 1)]
        other = torch.where(drawn == at, (drawn + 1) % self.vocab_size, drawn)
        return torch.where(depth < keep[row], at, torch.where(depth == keep[row], other, drawn))


class Filled:
    """A drafter that does its work and then drafts all that is wanted, found or not: random text repeats nothing."""

    def __init__(self, drafter: Any):
        self.drafter = drafter
        self.capturable = getattr(drafter, "capturable", False)

    def propose(self, rows: DraftRows, k: int) -> Draft:
        """See `specdec.draft.Drafter`."""
        draft = self.drafter.propose(rows, k)
        return Draft(draft.token_ids.clamp(min=0), rows.want, scores=draft.scores, written=draft.written)


def mixed(x: Tensor) -> Tensor:
    """Murmur3's 32-bit finaliser (Appleby), in int64."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
