"""The round, on the device: draft, grant, verify, accept, roll back, for every running row at once.

Tensors in, tensors out, the rows updated in place. Its shapes depend on `RoundShape` alone and it reads nothing back
to the host, so one shape is one CUDA graph; it says nothing about where a sequence came from or goes to.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.aside import Aside
from specdec.distribution import log_weights
from specdec.draft import Draft, Drafter, DraftRows, LookupDrafter, as_draft
from specdec.kernels import Sampling
from specdec.kernels import round as kernels
from specdec.kernels.adjust import tally
from specdec.kernels.columns import Settled
from specdec.kernels.logprobs import emitted_logprobs
from specdec.model import Packed, PagedModel
from specdec.processing import Processing
from specdec.rows import Rows, RowView
from specdec.verify import Accepted, Verification, Verifier


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What the host decides about a round. draft_steps: drafts per row at most, 0 is plain decoding.

    tokens: the token bucket, at least the number of rows; the best drafts fill it. None, where the device is the host
    (CPU): exactly the tokens that are wanted, so that nothing is padded. noise, filters: see RowView. adjusted: whether
    any row wants its logits adjusted; processed: by the host, so that the round can't be captured. logprobs,
    processed_logprobs: how many of the likeliest tokens to report beside each emitted one, by the model's own logits, and
    by what was drawn from; None for no report.
    """

    draft_steps: int
    tokens: int | None
    noise: bool
    filters: bool
    adjusted: bool = False
    processed: bool = False
    logprobs: int | None = None
    processed_logprobs: int | None = None


class Counts(NamedTuple):
    """What a round did with a row, as the first columns of its result hold it.

    num_accepted: before a cut at a stop id; num_wanted: drafts there would have been had the bucket held them; ran,
    finished, failed: 0 or 1.
    """

    num_emitted: int
    num_drafts: int
    num_accepted: int
    num_wanted: int
    drafter_len: int
    ran: int
    finished: int
    failed: int


@dataclass
class RoundResult:
    """What a round emitted, on the device. B rows in the order of the round's index.

    values [B, columns of Counts + draft_steps + 1] int64, one tensor so that one copy brings it to the host: the Counts,
    then the emitted token ids, padded with -1.
    logprobs: what `kernels.logprobs.emitted_logprobs` gives for them, one report after the other, if any was asked for.
    """

    values: Tensor
    logprobs: Tensor | None = None


class DrafterFailed(RuntimeError):
    """A drafter raised, or returned something that is no draft. The rows are as they were before the round."""

    def __init__(self, error: Exception):
        super().__init__(repr(error))
        self.error = error


class Round:
    """The parts of a round: rows, the target, a drafter or none, a verifier, and where rows may have them, processors."""

    def __init__(self, rows: Rows, target: PagedModel, drafter: Drafter | None, verifier: Verifier):
        self.rows, self.target, self.drafter, self.verifier = rows, target, drafter, verifier
        self.processing: Processing | None = None
        self._aside = Aside(rows.device)

    @property
    def elastic(self) -> bool:
        """Whether rounds had rather have less room for drafts than wait for a capture: look-up's cost nothing to leave out."""
        return isinstance(self.drafter, LookupDrafter)

    def drafts_on_host(self, shape: RoundShape) -> bool:
        """Whether the drafter is Python that may look at its rows, and is asked."""
        return bool(self.drafter and shape.draft_steps and not getattr(self.drafter, "capturable", False))

    def needs_host(self, shape: RoundShape) -> bool:
        """Whether the host waits for the device inside such a round, so that it can't be captured."""
        return shape.processed or self.drafts_on_host(shape)

    def run(self, index: Tensor, shape: RoundShape) -> RoundResult:
        """One round of the rows `index` [B] int64 (-1: padding)."""
        stages = self.stages(index, shape)
        while True:
            try:
                next(stages)
            except StopIteration as end:
                return end.value

    @torch.inference_mode()
    def stages(self, index: Tensor, shape: RoundShape) -> Generator[None, None, RoundResult]:
        """`run`, with a pause before each place where the host waits for the device: a drafter in Python, processors.

        Rounds of other rows may be launched in a pause. The host then waits for what stood before it alone.
        """
        view = self.rows.view(index, noise=shape.noise, filters=shape.filters, adjusted=shape.adjusted)
        running, want = room(view, shape.draft_steps)
        draft = yield from self._draft(view, running, want, shape)
        num_drafts = grant(draft, running, shape.tokens)
        verification = pack(view, running, draft, num_drafts, self._bucket(running, num_drafts, shape))
        raw = self.target.extend(verification.packed)
        logits = view.adjust(raw, verification.packed.positions + 1, draft.token_ids, verification.row)
        logits = yield from self._process(logits, verification, view, shape)
        accepted = self.verifier.accept(logits, verification, draft, view)
        emitted = accepted.token_ids, verification.row, verification.packed.cu_seqlens_q
        logprobs = self._report(raw, logits, emitted, view.sampling, shape)
        return RoundResult(self._roll_back(view, verification, draft, accepted), logprobs)

    def _draft(self, view: RowView, running: Tensor, want: Tensor, shape: RoundShape) -> Generator[None, None, Draft]:
        mark = None
        if self.drafts_on_host(shape):
            mark = self._aside.mark()
            yield
        with self._aside.after(mark):
            return self._propose(view, running, want, shape.draft_steps)

    def _process(
        self, logits: Tensor, verification: Verification, view: RowView, shape: RoundShape
    ) -> Generator[None, None, Tensor]:
        if not shape.processed or self.processing is None:
            return logits
        mark = self._aside.mark()
        yield
        with self._aside.after(mark):
            return self.processing.process(logits, verification, view)

    def _propose(self, view: RowView, running: Tensor, want: Tensor, k: int) -> Draft:
        batch = len(want)
        if self.drafter is None or k == 0:
            return Draft(want.new_zeros(batch, k), torch.zeros_like(want))
        rows = DraftRows(view, running, want)
        if not getattr(self.drafter, "capturable", False):
            rows = rows.copy()  # a drafter of one's own may scribble on what it is given, and keep it
        try:
            draft = as_draft(self.drafter.propose(rows, k), batch, k)
            draft.token_ids = draft.token_ids.to(want.device, torch.int64, copy=rows.view is not view)
            draft.log_q = None if draft.log_q is None else draft.log_q.to(want.device, copy=rows.view is not view)
            draft.counts = kernels.legal(draft.token_ids, draft.counts.to(want.device), want, self.target.vocab_size)
        except Exception as error:
            raise DrafterFailed(error) from error
        return draft

    def _bucket(self, running: Tensor, num_drafts: Tensor, shape: RoundShape) -> int:
        if shape.tokens is not None:
            return shape.tokens
        # Only where the device is the host: this look costs nothing there, and padding would cost a row of every layer.
        return max(1, int((num_drafts + running).sum()))

    def _report(
        self, raw: Tensor, logits: Tensor, emitted: tuple[Tensor, Tensor, Tensor], sampling: Sampling, shape: RoundShape
    ) -> Tensor | None:
        """The log-probabilities that the shape asks for. emitted: token ids [B, k + 1], rows of packed tokens, ends."""
        reports = []
        if shape.logprobs is not None:
            reports.append(emitted_logprobs(raw[:, : self.rows.vocab_size], *emitted, shape.logprobs))
        if shape.processed_logprobs is not None:
            logits, sampling = logits[:, : self.rows.vocab_size], Sampling(*(x[emitted[1]] for x in sampling))
            greedy = (sampling.temperature <= 0)[:, None]
            drawn_from = torch.where(greedy, logits.float(), log_weights(logits, sampling, filters=shape.filters))
            reports.append(emitted_logprobs(drawn_from, *emitted, shape.processed_logprobs))
        return torch.cat(reports, 2) if reports else None

    def _roll_back(self, view: RowView, verification: Verification, draft: Draft, accepted: Accepted) -> Tensor:
        """Move the rows past what was emitted. Nothing is copied: rejected KV lies past the end, to be overwritten."""
        settled = Settled(
            token_ids=accepted.token_ids,
            num_emitted=accepted.num_emitted,
            num_accepted=accepted.num_accepted,
            num_drafts=verification.num_drafts,
            num_wanted=draft.counts,
            running=verification.running,
            ended=accepted.ended,
            failed=accepted.failed,
            written=draft.written,
        )
        if view.adjustments is not None:
            tally(view.adjustments, view.index, accepted.token_ids, accepted.num_emitted)
        return kernels.settle(self.rows.state, view, settled)


def room(view: RowView, draft_steps: int) -> tuple[Tensor, Tensor]:
    """Which rows run [B] bool, and how many drafts each may use [B] int64.

    A row without a slot for its newest token stalls: it emits nothing and writes nothing. So reserving blocks ahead
    changes speed, never the output; under pressure drafts shrink first.
    """
    return kernels.room(view, draft_steps)


def grant(draft: Draft, running: Tensor, tokens: int | None) -> Tensor:
    """[B] drafts of each row that enter the bucket of `tokens`: the best scores, always a prefix of the row.

    Of equal scores the shallower draft goes first, so that ties are shared fairly and prefixes stay whole for any
    non-increasing score.
    """
    batch, k = draft.token_ids.shape
    if k == 0 or tokens is None or tokens >= batch * (k + 1):
        return draft.counts
    scores = torch.zeros_like(draft.token_ids, dtype=torch.float32) if draft.scores is None else draft.scores
    return kernels.grant(draft.counts, scores, running, tokens)


def pack(view: RowView, running: Tensor, draft: Draft, num_drafts: Tensor, tokens: int) -> Verification:
    """Lay the rows' newest tokens and granted drafts one after another in a bucket of `tokens`, ragged.

    Row r has num_drafts[r] + 1 query tokens at positions l - 1 .. l - 1 + num_drafts[r]; padding writes nothing.
    """
    laid = kernels.pack(view, running, draft.token_ids, num_drafts, tokens)
    packed = Packed.of(laid, view.block_table, draft.token_ids.shape[1] + 1)
    return Verification(packed, laid.row, num_drafts, running)
