"""Drafting by look-up: copy what followed the longest earlier occurrence of the newest tokens. No model needed.

Prompt lookup (Saxena 2023) with the idea of SuffixDecoding (arXiv 2411.04975) that longer matches deserve longer drafts:
a draft is made where it is likelier to survive than it costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.draft.base import Draft, DraftRows
from specdec.kernels import match
from specdec.shown import shown

FIRST = (0.0, 0.21, 0.43, 0.59, 0.75, 0.80, 0.80, 0.80, 0.80, 0.80, 0.80, 0.80, 0.88, 0.88, 0.88, 0.88, 0.98)
NEXT = (0.0, 0.50, 0.60, 0.72, 0.78, 0.82, 0.82, 0.82, 0.82, 0.82, 0.82, 0.82, 0.88, 0.88, 0.88, 0.88, 0.975)
"""How often the first draft after a match of n tokens is right, and each one after a right one: SmolLM2-135M-Instruct,
3,368 positions of 28 greedy answers to chat, code, copying and translation (docs/results.md). Longer matches: the last."""

TOKEN_COST = {"cpu": 0.05, "cuda": 0.01}
"""What one more token adds to a round, as a share of a round of one token: SmolLM2-135M, the upper end of what was measured."""


class LookupDrafter:
    """Looks for up to `max_match` newest tokens in prompt and output, and drafts what followed them while it pays.

    token_cost: what one more token to verify adds to a round of a single token, as a share of its time (None: by device).
    With B rows, a draft pays if it survives with a probability of at least c / (1 + c), c = B * token_cost: below that,
    plain decoding of the other rows emits more in the same time. A match shorter than `min_match` drafts nothing.
    Where no cost is given, `learn` replaces the built-in one by what rounds really take.
    """

    capturable = True

    def __init__(self, *, max_match: int = 16, min_match: int = 1, token_cost: float | None = None):
        for name, value in (("max_match", max_match), ("min_match", min_match)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {shown(value)}")
        if token_cost is not None and not token_cost >= 0:
            raise ValueError(f"token_cost: expected None or a number of at least 0, got {shown(token_cost)}")
        self.max_match, self.min_match, self.token_cost = max_match, min_match, token_cost
        self._learnt: float | None = None
        self._costs: dict[torch.device, Tensor] = {}
        self._tables: dict[tuple[torch.device, int], Tensor] = {}

    def propose(self, rows: DraftRows, k: int) -> Draft:
        tokens, counts, lengths = match(
            rows.token_ids, rows.lengths, k=k, max_match=self.max_match, min_match=self.min_match
        )
        scores = self._survival(tokens.device, k)[lengths]
        least = self._least(len(tokens), tokens.device)
        return Draft(tokens, torch.minimum(counts, (scores >= least).sum(1)), scores=scores)

    def learn(self, batch: int, least: float) -> None:
        """Draft from now on where survival is at least `least` in rounds of `batch` rows, within reason.

        Times are noisy: the cost of a token stays within a factor of four of the built-in one, and small changes are
        left out.
        """
        if self.token_cost is not None:
            return
        for device, cost in self._costs.items():
            usual = TOKEN_COST.get(device.type, TOKEN_COST["cuda"])
            token_cost = min(max(least / max(1 - least, 1e-3) / batch, usual / 4), usual * 4)
            known = usual if self._learnt is None else self._learnt
            if not 0.8 < token_cost / known < 1.25:
                self._learnt = token_cost
                with torch.inference_mode():
                    cost.fill_(token_cost)  # in place: a captured round reads it there

    def _least(self, batch: int, device: torch.device) -> Tensor:
        """[] the survival from which on a draft pays."""
        if device not in self._costs:
            usual = TOKEN_COST.get(device.type, TOKEN_COST["cuda"]) if self.token_cost is None else self.token_cost
            self._costs[device] = torch.tensor(usual, dtype=torch.float64, device=device)
        cost = batch * self._costs[device]
        return cost / (1 + cost)

    def _survival(self, device: torch.device, k: int) -> Tensor:
        """[max_match + 1, k] how often draft j + 1 of a match of so many tokens is accepted; kept, made before a capture."""
        if (device, k) not in self._tables:
            n = torch.arange(self.max_match + 1).clamp(max=len(FIRST) - 1)
            first, then = torch.tensor(FIRST)[n], torch.tensor(NEXT)[n]
            self._tables[device, k] = (first[:, None] * then[:, None] ** torch.arange(k)).to(device)
        return self._tables[device, k]
