"""What a verifier is given and what it decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdec.draft import Draft
from specdec.model import Packed
from specdec.rows import RowView


@dataclass(slots=True)
class Verification:
    """The packed tokens of a round: row r has its newest token and then num_drafts[r] drafts, if it runs.

    row [N] int64, the round's row of each packed token; num_drafts [B] int64; running [B] bool.
    """

    packed: Packed
    row: Tensor
    num_drafts: Tensor
    running: Tensor


@dataclass(slots=True)
class Accepted:
    """token_ids [B, k + 1] int64, padded with -1; num_emitted [B], cut at a stop id, 0 for a row that does not run;
    num_accepted [B], before the cut; ended [B] bool, at a stop id; failed [B] bool, no token could be drawn.
    """

    token_ids: Tensor
    num_emitted: Tensor
    num_accepted: Tensor
    ended: Tensor
    failed: Tensor


class Verifier(Protocol):
    """Turns the target's logits into emitted tokens: accepted drafts, then the bonus or corrected token."""

    def accept(self, logits: Tensor, verification: Verification, draft: Draft, view: RowView) -> Accepted: ...
