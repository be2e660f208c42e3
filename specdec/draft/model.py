"""Drafting with a smaller model of the same vocabulary, on the same blocks and with the target's own noise."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.distribution import log_weights, unfiltered
from specdec.draft.base import Draft, DraftRows
from specdec.kernels import round as kernels
from specdec.kernels import sample
from specdec.model import Packed, PagedModel
from specdec.noise import DRAFT, fresh_seed
from specdec.rows import RowView


class ModelDrafter:
    """Draws each draft from `model` with the noise that the target will use, so that equal distributions agree.

    Step 0 of a round runs the last `window` tokens and writes only what the model lacks, so its shape does not depend
    on how the last round ended: after a full acceptance the drafter is one token behind. A row further behind drafts
    nothing until the engine has caught it up.

    keep_q: for verifiers that compare probabilities. Drafts are then drawn with noise of their own, from log weights that
    are kept in half precision, greatest 0: rounded first and drawn from afterwards, so that what is kept is what was used.
    """

    capturable = True

    def __init__(self, model: PagedModel, *, vocab_size: int, window: int = 2, keep_q: bool = False):
        self.model, self.window, self.keep_q = model, window, keep_q
        self.vocab_size = min(vocab_size, model.vocab_size)

    def propose(self, rows: DraftRows, k: int) -> Draft:
        # Step 0 runs even where nothing is wanted: it keeps a row's drafter warm at k = 0.
        counts, depth = kernels.draft_depth(rows.view, rows.running, rows.want, self.window)
        drafts = rows.want.new_empty(k, len(rows.want))
        log_q = None
        if self.keep_q and rows.view.noise:
            log_q = rows.want.new_empty(len(rows.want), k, self.vocab_size, dtype=torch.float16)
        for j in range(k):
            self._step(rows.view, depth, drafts, j, log_q)
        return Draft(drafts.t(), counts, written=depth, log_q=log_q)

    def _step(self, view: RowView, depth: Tensor, drafts: Tensor, j: int, log_q: Tensor | None) -> None:
        """Draw draft j of every row, [B] int64, into drafts[j]; -1 for a row without a token to draw (NaN logits).

        Masked leading tokens stay in the packing, so attention sees lengths that end at l + j for every row.
        """
        previous = drafts[j - 1] if j else None
        step = kernels.draft_step(view, depth, previous, j, self.window, self.model.vocab_size)
        n = 1 if j else self.window
        packed = Packed.of(step, view.block_table, n)
        logits = self.model.extend(packed).view(len(depth), n, -1)[:, -1]
        logits = view.adjust(logits, step.drawn_at, drafts[:j].t())  # as the target's will be, or it draws others
        if log_q is None:
            sample(
                logits,
                step.drawn_at,
                view.sampling,
                noise=view.noise,
                filters=view.filters,
                vocab_size=self.vocab_size,
                out=drafts[j],
            )
        else:
            log_q[:, j] = log_weights(logits[:, : self.vocab_size], view.sampling, filters=view.filters)
            fresh = unfiltered(fresh_seed(view.sampling.seed, view.num_tokens, DRAFT))
            sample(log_q[:, j], step.drawn_at, fresh, filters=False, out=drafts[j])
