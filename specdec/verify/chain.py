"""Verifying by probabilities: how many of a row's drafts stand is drawn, then the token after them.

A method is one pure function of a `Chain`: its `Decision` holds probabilities and no draws, so that `specdec.audit` can
integrate the very code that serves. Here stands what the methods share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.distribution import log_weights, unfiltered
from specdec.draft import Draft
from specdec.kernels import Sampling, accept, sample
from specdec.noise import ACCEPT, EMIT, fresh_seed, uniform
from specdec.rows import RowView
from specdec.verify.base import Accepted, Verification
from specdec.verify.coupled import CoupledVerifier


@dataclass(slots=True)
class Chain:
    """The drafts of B rows beside the probabilities of both models, up to k drafts in a row.

    target [N, V]: P at every packed token; at [B, k + 1] int64: where row b's distribution after i drafts stands in it;
    token_ids [B, k]; lengths [B]: drafts to be judged; draft [B, k, Q], Q <= V: what each draft was drawn from, tokens
    past Q never; None: each draft is taken as it comes, a point mass.
    """

    target: Tensor
    at: Tensor
    token_ids: Tensor
    lengths: Tensor
    draft: Tensor | None = None

    @property
    def depth(self) -> Tensor:
        """[k] int64: how many drafts stand before each."""
        return torch.arange(self.token_ids.shape[1], device=self.at.device)

    @property
    def judged(self) -> Tensor:
        """[B, k] bool."""
        return self.depth < self.lengths[:, None]

    def ratios(self) -> Tensor:
        """[B, k]: P over Q at each draft, 0 where no draft is judged."""
        ids = self.token_ids.clamp(min=0)
        p = self.target[self.at[:, :-1], ids]
        if self.draft is None:
            return torch.where(self.judged, p, 0)
        q = self.draft.gather(2, ids.clamp(max=self.draft.shape[2] - 1)[:, :, None])[:, :, 0]
        return torch.where(self.judged & (q > 0), p / q, 0)

    def surplus(self, scale: Tensor) -> Tensor:
        """[B, k]: the sum over v of max(scale P(v) - Q(v), 0) where draft i + 1 was drawn; scale [B, k]."""
        if self.draft is None:
            return scale * (1 - self.target[self.at[:, :-1], self.token_ids.clamp(min=0)])
        sums = [self._excess(self.target[self.at[:, i]], scale[:, i], self.draft[:, i]).sum(1) for i in self._steps]
        return torch.stack(sums, 1)

    def residual(self, accepted: Tensor, scale: Tensor) -> Tensor:
        """[B, V]: what the token after `accepted` [B] drafts is drawn from, up to a factor: max(scale P - Q, 0); scale [B].

        P itself past the last draft, and where nothing is left: P and Q are then the same.
        """
        p = self.target[self.at.gather(1, accepted[:, None])[:, 0]]
        if not self.token_ids.shape[1]:
            return p
        i = accepted.clamp(max=self.token_ids.shape[1] - 1)
        if self.draft is None:
            left = p.scatter(1, self.token_ids.gather(1, i[:, None]).clamp(min=0), 0)
        else:
            left = self._excess(p, scale, self.draft[torch.arange(len(i), device=i.device), i])
        none = (accepted >= self.lengths)[:, None] | (left.sum(1, keepdim=True) <= 0)
        return torch.where(none, p, left)

    @property
    def _steps(self) -> range:
        return range(self.token_ids.shape[1])

    @staticmethod
    def _excess(p: Tensor, scale: Tensor, q: Tensor) -> Tensor:
        p = p * scale[:, None]
        return torch.cat([p[:, : q.shape[1]] - q, p[:, q.shape[1] :]], 1).clamp(min=0)


@dataclass(slots=True)
class Decision:
    """survival [B, k]: the probability that at least i = 1..k drafts of a row stand, non-increasing;
    scale [B, k + 1]: the factor of P in the residual after i = 0..k of them.
    """

    survival: Tensor
    scale: Tensor


class ChainVerifier:
    """Verifies by the method `decide`. `vocab_size`: ids that may be drawn.

    Its draws come from streams of their own in every round, so the tokens depend on how drafts fell, their distribution
    does not. Rounds of greedy rows alone are verified by equality, which is what every method comes to.
    """

    def __init__(self, decide: Callable[[Chain], Decision], vocab_size: int):
        self.decide, self.vocab_size = decide, vocab_size
        self.greedy = CoupledVerifier(vocab_size)

    def accept(self, logits: Tensor, verification: Verification, draft: Draft, view: RowView) -> Accepted:
        """logits [N, vocab] of the packed tokens, row l - 1 + i of a sequence judging its draft i + 1."""
        if not view.noise:
            return self.greedy.accept(logits, verification, draft, view)
        chain = self._chain(logits, verification, draft, view)
        decision = self.decide(chain)
        chance = uniform(fresh_seed(view.sampling.seed, view.num_tokens, ACCEPT))
        accepted = (chance[:, None] < decision.survival).sum(1)
        weights = chain.residual(accepted, decision.scale.gather(1, accepted[:, None])[:, 0])
        emit = unfiltered(fresh_seed(view.sampling.seed, view.num_tokens, EMIT))
        token = sample(weights.log(), view.num_tokens + accepted, emit, filters=False)
        drawn = self._drawn(verification, draft, accepted, token)
        ends = verification.packed.cu_seqlens_q
        return Accepted(*accept(drawn, draft.token_ids, accepted, ends, view.stop_ids, verification.running))

    def _chain(self, logits: Tensor, verification: Verification, draft: Draft, view: RowView) -> Chain:
        """The chain up to the first distribution that is none (NaN): what follows it can't be judged."""
        sampling = Sampling(*(column[verification.row] for column in view.sampling))
        target = log_weights(logits[:, : self.vocab_size], sampling, filters=view.filters).softmax(1)
        batch, k = draft.token_ids.shape
        depth = torch.arange(k + 1, device=target.device)
        at = (verification.packed.cu_seqlens_q[:-1, None] + depth).clamp(max=len(target) - 1).long()
        sound = (target[:, 0] >= 0)[at].long().cumprod(1).sum(1)
        lengths = torch.minimum(torch.where(verification.running, verification.num_drafts, 0), sound)
        q = None if draft.log_q is None else draft.log_q[:, :, : self.vocab_size].float().softmax(2)
        return Chain(target, at, draft.token_ids, lengths, q)

    @staticmethod
    def _drawn(verification: Verification, draft: Draft, accepted: Tensor, token: Tensor) -> Tensor:
        """[N]: each packed token's successor: the drafts that stand, then `token`."""
        row = verification.row
        offset = torch.arange(len(row), device=row.device) - verification.packed.cu_seqlens_q[row]
        following = torch.cat([draft.token_ids, token[:, None]], 1).scatter(1, accepted[:, None], token[:, None])
        return following[row, offset.clamp(0, draft.token_ids.shape[1])]
