"""Logits processors of requests, transformers' or one's own: Python on the host, in a round that is therefore not captured.

They see each verified position of their row as transformers would show it to them: all tokens before it, drafts of the
round included, and its scores. They are asked about drafts that may be rejected, so what they return must be a function
of what they are given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.rows import RowView
from specdec.sequence import Sequence
from specdec.verify import Verification


class Processing:
    """Runs the processors of the rows of a round. placed: the sequence in each row of the engine, None in a free one."""

    def __init__(self, placed: list[Sequence | None]):
        self.placed = placed

    def process(self, logits: Tensor, verification: Verification, view: RowView) -> Tensor:
        """[N, V] fp32: the logits of the packed tokens, processed where their row asks for it. Looks at the device once."""
        out = logits.to(torch.float32, copy=True)
        packed = verification.packed
        first, drafts, runs = packed.cu_seqlens_q[:-1].long(), verification.num_drafts, verification.running.long()
        columns = torch.stack([view.index, view.num_tokens, first, drafts, runs])
        for row, l, begin, k, running in columns.t().tolist():
            seq = self.placed[row] if row < len(self.placed) else None
            if not running or seq is None or not seq.processors:
                continue
            seq.failures.clear()
            known = view.all_tokens[row, :l].long()
            tokens = torch.cat([known, packed.token_ids[begin + 1 : begin + 1 + k]])
            for i in range(k + 1):
                out[begin + i] = _processed(seq, tokens[: l + i], out[begin + i])
        return out


def _processed(seq: Sequence, tokens: Tensor, scores: Tensor) -> Tensor:
    """[V]; NaN where a processor fails, which ends the row if it gets there, and no other."""
    processed = scores[None]
    try:
        for processor in seq.processors:
            processed = processor(tokens[None], processed)
            if not isinstance(processed, Tensor) or processed.shape != (1, len(scores)):
                got = list(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
                raise ValueError(f"logits_processors: expected scores of shape [1, {len(scores)}] back, got {got}")
        if _empty(processed) and not _empty(scores):
            raise ValueError(
                "logits_processors: expected scores that leave a token to draw, got NaN, or none above -inf"
            )
    except Exception as error:
        error.add_note("raised by a processor of logits_processors")
        seq.failures[len(tokens)] = error
        return torch.full_like(scores, torch.nan)
    return processed[0].to(scores)


def _empty(scores: Tensor) -> bool:
    return bool(scores.isnan().any() | (scores == -torch.inf).all())
