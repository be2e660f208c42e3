"""Drafting with a smaller model of the same vocabulary, on the same blocks and with the target's own noise."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.draft.base import Draft, DraftRows
from specdec.kernels import sample
from specdec.model import Packed, PagedModel, slots


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
        view, l = rows.view, rows.lengths
        synced = rows.running & (view.drafter_len >= l - self.window)
        want = torch.where(synced, rows.want, 0)
        # Step 0 writes position l - 1 even where nothing is wanted: it keeps the row's drafter warm at k = 0.
        depth = want.clamp(min=1)
        tokens = [self._draw(rows, self._first(rows, synced), l)]
        for j in range(1, k):
            tokens.append(self._draw(rows, self._next(rows, tokens[-1], synced & (j < depth), j), l + j))
        return Draft(torch.stack(tokens, 1), want, written=torch.where(synced, depth, 0))

    def _first(self, rows: DraftRows, synced: Tensor) -> Tensor:
        """[B, vocab] logits after the last `window` tokens of each synced row."""
        view, w = rows.view, self.window
        positions = rows.lengths[:, None] - w + torch.arange(w, device=rows.lengths.device)
        known = synced[:, None] & (positions >= 0)  # a row of one token has no l - 2
        write = known & (positions >= view.drafter_len[:, None])
        positions = torch.where(known, positions, 0)
        ids = torch.where(known, view.tokens(positions), 0)
        # Masked leading tokens stay in the packing, so attention must see lengths that end at l for every row.
        return self._extend(rows, ids, positions, write, torch.where(synced, rows.lengths, 0)).view(len(ids), w, -1)[
            :, -1
        ]

    def _next(self, rows: DraftRows, tokens: Tensor, live: Tensor, j: int) -> Tensor:
        """[B, vocab] logits after draft j - 1, the token at position l - 1 + j."""
        positions = torch.where(live, rows.lengths - 1 + j, 0)[:, None]
        ids = torch.where(live, tokens, 0)[:, None]
        return self._extend(rows, ids, positions, live[:, None], torch.where(live, rows.lengths + j, 0))

    def _extend(self, rows: DraftRows, ids: Tensor, positions: Tensor, write: Tensor, seq_lens: Tensor) -> Tensor:
        """One forward of the same number of tokens for every row: ids, positions, write [B, n]; seq_lens [B]."""
        batch, n = ids.shape
        block_table = rows.view.block_table
        row = torch.arange(batch, device=ids.device)
        packed = Packed(
            token_ids=torch.where(ids < self.model.vocab_size, ids, 0).flatten(),
            positions=positions.flatten(),
            slot_mapping=slots(
                block_table, row.repeat_interleave(n), positions.flatten(), write.flatten(), rows.view.block_size
            ),
            block_table=block_table,
            seq_lens=seq_lens.int(),
            cu_seqlens_q=torch.arange(0, batch * n + 1, n, dtype=torch.int32, device=ids.device),
            max_seqlen_q=n,
        )
        return self.model.extend(packed)

    def _draw(self, rows: DraftRows, logits: Tensor, positions: Tensor) -> Tensor:
        view = rows.view
        drawn = sample(
            logits, positions, rows.sampling, noise=view.noise, filters=view.filters, vocab_size=self.vocab_size
        )
        return drawn.clamp(min=0)  # a row without a token to draw (NaN logits) drafts anything; the target decides
