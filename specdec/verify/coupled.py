"""The default verifier: a draft is accepted while it equals the token that the target draws at its position.

Target and drafter draw with the same counter-based noise, keyed by (seed, position, token), so the output is a function
of model, prompt, parameters and seed alone, and verifying *is* sampling (Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

from torch import Tensor

from specdec.draft import Draft
from specdec.kernels import accept, sample
from specdec.rows import RowView
from specdec.verify.base import Accepted, Verification


class CoupledVerifier:
    """Draws a token at every verified position and keeps the drafts that match. `vocab_size`: ids that may be drawn."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def accept(self, logits: Tensor, verification: Verification, draft: Draft, view: RowView) -> Accepted:
        """logits [N, vocab] of the packed tokens, row l - 1 + i of a sequence drawing its position l + i."""
        drawn = sample(
            logits,
            verification.packed.positions + 1,
            view.sampling,
            rows=verification.row,
            noise=view.noise,
            filters=view.filters,
            vocab_size=self.vocab_size,
        )
        return Accepted(
            *accept(
                drawn,
                draft.token_ids,
                verification.num_drafts,
                verification.packed.cu_seqlens_q,
                view.stop_ids,
                verification.running,
            )
        )
