"""Mistakes that shipped somewhere, planted into the running code: each a function of pytest's monkeypatch. Tests only."""

import torch

import specdec.draft.model
import specdec.kernels.reference.sample
import specdec.verify.chain
import specdec.verify.coupled
from specdec import noise
from specdec.draft import ModelDrafter
from specdec.kernels import accept, sample
from specdec.rows import RowView
from specdec.verify import Chain


def shared_noise(patch):
    """The token after the drafts is drawn with the noise that the drafts were drawn with."""
    patch.setattr(specdec.verify.chain, "EMIT", noise.DRAFT)


def position_keyed_noise(patch):
    """A draft that was thrown away comes back with the same noise when its position is drafted again."""
    patch.setattr(
        specdec.draft.model,
        "fresh_seed",
        lambda seed, num_tokens, stream: noise.fresh_seed(seed, torch.ones_like(num_tokens), stream),
    )


def ratio_test_on_greedy_drafts(patch):
    """Drafts are the likeliest tokens, and tested as if they had been drawn."""

    def greedy(logits, positions, sampling, **kwargs):
        return sample(logits, positions, sampling, **kwargs | {"noise": False})

    patch.setattr(specdec.draft.model, "sample", greedy)


def dropped_drafts(patch):
    """A draft is not submitted if it is unlikely itself."""
    propose = ModelDrafter.propose

    def pruned(self, rows, k):
        draft = propose(self, rows, k)
        q = draft.log_q.float().softmax(2).gather(2, draft.token_ids.clamp(min=0)[:, :, None])[:, :, 0]
        draft.counts = torch.minimum(draft.counts, (q >= 0.425).long().cumprod(1).sum(1))
        return draft

    patch.setattr(ModelDrafter, "propose", pruned)


def accept_all_by_ratio(patch):
    patch.setattr(Chain, "ratios", lambda self: self.judged.to(self.target.dtype))


def accept_all_by_equality(patch):
    def generous(drawn, drafts, num_drafts, ends, stop_ids, running):
        drawn = drawn.clone()
        for row, count in enumerate(num_drafts.tolist()):
            drawn[ends[row] : ends[row] + count] = drafts[row, :count]
        return accept(drawn, drafts, num_drafts, ends, stop_ids, running)

    patch.setattr(specdec.verify.coupled, "accept", generous)


def q_before_filters(patch):
    """Drafts are drawn after top-k and the like, q is noted before."""
    log_weights = specdec.draft.model.log_weights

    def unfiltered(logits, sampling, *, filters=True):
        return log_weights(logits, sampling, filters=False)

    def filtered_sample(weights, positions, sampling, **kwargs):
        return sample(
            weights, positions, sampling._replace(top_k=torch.full_like(sampling.seed, 2)), **kwargs | {"filters": True}
        )

    patch.setattr(specdec.draft.model, "log_weights", unfiltered)
    patch.setattr(specdec.draft.model, "sample", filtered_sample)


def penalties_ignore_drafts(patch):
    """Penalties count the tokens that are out, and none of the drafts before a token in its own round."""
    adjust = RowView.adjust
    patch.setattr(
        RowView,
        "adjust",
        lambda self, logits, positions, drafts, rows=None: adjust(
            self, logits, positions, torch.full_like(drafts, -1), rows
        ),
    )


def starved_tail(patch):
    """-log(-log(u)) of a u in fp32: noise ends at 16.6."""

    def short(words):
        u = ((words >> 8).float() + 0.5) * 2.0**-24
        return -(-(1 - u).log()).log()

    patch.setattr(specdec.kernels.reference.sample, "gumbel_of_words", short)
