"""What a drafter is given and what it gives back. A new drafter is one small file with one method, `propose`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec.kernels import Sampling
from specdec.rows import RowView


@dataclass(slots=True)
class DraftRows:
    """The B rows of a round as a drafter sees them. Everything lives on the engine's device.

    view: their columns, with block table and drafter KV for drafters that have a paged model. running [B] bool.
    want [B] int64: drafts the row may use, 0..k; 0 for a row that does not run.
    """

    view: RowView
    running: Tensor
    want: Tensor

    def copy(self) -> DraftRows:
        """The same rows in memory of their own, histories included."""
        return DraftRows(self.view.copy(), self.running.clone(), self.want.clone())

    @property
    def token_ids(self) -> Tensor:
        """[B, W] int32: row r's first `lengths[r]` entries are its tokens, what follows is garbage."""
        return self.view.history

    @property
    def lengths(self) -> Tensor:
        """[B] int64."""
        return self.view.num_tokens

    @property
    def sampling(self) -> Sampling:
        """Temperature and filters per row, for drafters that draw with the target's own noise (`kernels.sample`;
        draft j is the token at position lengths + j).
        """
        return self.view.sampling

    @property
    def seeds(self) -> Tensor:
        """[B] int64."""
        return self.view.sampling.seed


@dataclass(slots=True)
class Draft:
    """token_ids [B, k] int64; counts [B] int64, how many of a row's drafts are meant.

    scores [B, k] float, an estimate of each draft's survival, non-increasing along a row (None: all alike);
    written [B] int64, positions whose drafter KV this round wrote, from l - 1 on (None: nothing is kept);
    log_q [B, k, Q] float, log weights that each draft was drawn from with noise of its own round (`specdec.noise`), for
    verifiers that compare probabilities; tokens past Q had none. None: the drafts are taken as they come, which is exact
    however they were chosen. A wrong log_q changes the output, and so does a count that looks at the draft it drops.
    """

    token_ids: Tensor
    counts: Tensor
    scores: Tensor | None = None
    written: Tensor | None = None
    log_q: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """`propose(rows, k)` returns a `Draft`, or just `(token_ids [B, k], counts [B])`. k >= 1.

    Wrong drafts cost time and never change the output (a wrong `log_q` does). `capturable = True` promises that `propose`
    launches the same device work whatever the tokens are, reads nothing back and changes nothing that it was given, so that
    it may run inside a CUDA graph. Any other drafter is given copies. One that raises, or returns no draft, is set aside
    with a warning.
    """

    def propose(self, rows: DraftRows, k: int) -> Draft | tuple[Tensor, Tensor]: ...


def as_draft(proposal: Any, batch: int, k: int) -> Draft:
    """Check what a drafter returned. Raises ValueError or TypeError naming what was expected and what came."""
    draft = proposal if isinstance(proposal, Draft) else None
    if draft is None:
        if not isinstance(proposal, tuple) or len(proposal) != 2:
            raise TypeError(f"propose: expected a Draft or (token_ids, counts), got {type(proposal).__name__}")
        draft = Draft(torch.as_tensor(proposal[0]), torch.as_tensor(proposal[1]))
    if tuple(draft.token_ids.shape) != (batch, k):
        raise ValueError(f"propose: expected token_ids of shape {(batch, k)}, got {tuple(draft.token_ids.shape)}")
    if tuple(draft.counts.shape) != (batch,):
        raise ValueError(f"propose: expected counts of shape {(batch,)}, got {tuple(draft.counts.shape)}")
    for name, value, shape in (("scores", draft.scores, (batch, k)), ("written", draft.written, (batch,))):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"propose: expected {name} to be a tensor or None, got {type(value).__name__}")
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"propose: expected {name} of shape {shape}, got {tuple(value.shape)}")
    q = draft.log_q
    if q is not None and (not isinstance(q, Tensor) or q.dim() != 3 or tuple(q.shape[:2]) != (batch, k)):
        raise ValueError(f"propose: expected log_q of shape {(batch, k)} + (Q,), got {getattr(q, 'shape', q)}")
    return draft
