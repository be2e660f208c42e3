"""Drafting by look-up: copy what followed the longest earlier occurrence of the newest tokens. No model needed.

Prompt lookup (Saxena 2023) with the draft length of SuffixDecoding (arXiv 2411.04975): it grows with the match.
"""

from __future__ import annotations

import torch

from specdec.draft.base import Draft, DraftRows
from specdec.kernels import match


class LookupDrafter:
    """Looks for up to `max_match` newest tokens in prompt and output; a match of n tokens drafts n * growth of them.

    A match shorter than `min_match` drafts nothing: in open text short matches are chance, and a wrong draft costs
    a wider verification.
    """

    capturable = True

    def __init__(self, *, max_match: int = 16, min_match: int = 2, growth: int = 2):
        for name, value in (("max_match", max_match), ("min_match", min_match), ("growth", growth)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
        self.max_match, self.min_match, self.growth = max_match, min_match, growth

    def propose(self, rows: DraftRows, k: int) -> Draft:
        tokens, counts, lengths = match(
            rows.token_ids, rows.lengths, k=k, max_match=self.max_match, min_match=self.min_match
        )
        counts = torch.minimum(counts, (lengths - self.min_match + 1).clamp(min=0) * self.growth)
        # A long match survives further: per-token acceptance rises towards 1 with the length of the match.
        survival = (lengths + 1.0) / (lengths + 2.0)
        depth = torch.arange(1, k + 1, device=tokens.device)
        return Draft(tokens, counts, scores=survival[:, None] ** depth)
