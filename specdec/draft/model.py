"""Drafting with a smaller model of the same vocabulary, on the same blocks and with the target's own noise."""

from __future__ import annotations

from torch import Tensor

from specdec.draft.base import Draft, DraftRows
from specdec.kernels import round as kernels
from specdec.kernels import sample
from specdec.model import Packed, PagedModel
from specdec.rows import RowView


class ModelDrafter:
    """Draws each draft from `model` with the noise that the target will use, so that equal distributions agree.

    Step 0 of a round runs the last `window` tokens and writes only what the model lacks, so its shape does not depend
    on how the last round ended: after a full acceptance the drafter is one token behind. A row further behind drafts
    nothing until the engine has caught it up.
    """

    capturable = True

    def __init__(self, model: PagedModel, *, vocab_size: int, window: int = 2):
        self.model, self.window = model, window
        self.vocab_size = min(vocab_size, model.vocab_size)

    def propose(self, rows: DraftRows, k: int) -> Draft:
        # Step 0 runs even where nothing is wanted: it keeps a row's drafter warm at k = 0.
        counts, depth = kernels.draft_depth(rows.view, rows.running, rows.want, self.window)
        drafts = rows.want.new_empty(k, len(rows.want))
        for j in range(k):
            self._step(rows.view, depth, drafts, j)
        return Draft(drafts.t(), counts, written=depth)

    def _step(self, view: RowView, depth: Tensor, drafts: Tensor, j: int) -> None:
        """Draw draft j of every row, [B] int64, into drafts[j]; -1 for a row without a token to draw (NaN logits).

        Masked leading tokens stay in the packing, so attention sees lengths that end at l + j for every row.
        """
        previous = drafts[j - 1] if j else None
        step = kernels.draft_step(view, depth, previous, j, self.window, self.model.vocab_size)
        n = 1 if j else self.window
        packed = Packed(
            token_ids=step.token_ids,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            block_table=view.block_table,
            seq_lens=step.seq_lens,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=n,
        )
        logits = self.model.extend(packed).view(len(depth), n, -1)[:, -1]
        logits = view.adjust(logits, step.drawn_at, drafts[:j].t())  # as the target's will be, or it draws others
        sample(
            logits,
            step.drawn_at,
            view.sampling,
            noise=view.noise,
            filters=view.filters,
            vocab_size=self.vocab_size,
            out=drafts[j],
        )
