"""Scores and logits of a paged call are transformers' own, step by step and row by row."""

import copy

import pytest
import torch
from hf.prompts import LENGTHS, NEW, an_end, batch
from support import tiny

import specdec.hf

KEEP = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "pad_token_id": 0}
CALLS = {
    "greedy": {},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "an end token": {"eos_token_id": an_end()},
    "stopping": {"eos_token_id": an_end(), "stopping_criteria": [lambda ids, scores: ids[:, -1] == 11]},
}
ENDS = {"greedy": [], "processors": [], "an end token": [an_end()], "stopping": [an_end(), 11]}


@pytest.mark.parametrize("drafter", [None, "lookup", "near"])
@pytest.mark.parametrize("call", CALLS)
def test_greedy(model, call, drafter):
    arguments = {**batch(), **KEEP, **CALLS[call], "do_sample": False, "max_new_tokens": NEW}
    want = tiny("llama").generate(**arguments)
    drafter = copy.deepcopy(tiny("llama", noise=0.01)) if drafter == "near" else drafter
    with specdec.hf.enable(model, drafter=drafter, plain=True, k=3) as enabled:
        got = model.generate(**arguments)
        assert drafter is None or enabled.stats.drafted
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.scores) == len(got.logits) == len(want.scores)
    emitted = want.sequences[:, max(LENGTHS) :]
    ends = torch.isin(emitted, torch.tensor(ENDS[call], dtype=torch.long))
    running = ends.cumsum(1) - ends.long() == 0  # transformers goes on to score rows that have ended
    for step in range(len(want.scores)):
        for name in ("scores", "logits"):
            ours, theirs = getattr(got, name)[step], getattr(want, name)[step]
            assert ours.dtype == theirs.dtype == torch.float32 and ours.shape == theirs.shape
            rows = running[:, step]
            torch.testing.assert_close(ours[rows], theirs[rows], rtol=1e-4, atol=1e-4)
            assert not ours[~rows].any()
    transitions = model.compute_transition_scores(got.sequences, got.scores, normalize_logits=True)
    wanted = model.compute_transition_scores(want.sequences, want.scores, normalize_logits=True)
    torch.testing.assert_close(transitions[running], wanted[running], rtol=1e-4, atol=1e-4)


def test_sampled_scores_are_warped_and_logits_are_not(model):
    inputs = batch()
    arguments = {**inputs, **KEEP, "do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": NEW}
    with specdec.hf.enable(model, drafter="lookup", k=3):
        out = model.generate(**arguments)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(LENGTHS), NEW, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    own = tiny("llama")(out.sequences, attention_mask=mask, position_ids=positions).logits[:, max(LENGTHS) - 1 : -1]
    logits, scores = torch.stack(out.logits, 1), torch.stack(out.scores, 1)
    torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
    finite = scores.isfinite()
    assert (finite.sum(-1) == 5).all() and finite.gather(2, out.sequences[:, max(LENGTHS) :, None]).all()
    torch.testing.assert_close(scores[finite], (logits / 0.7)[finite])


def test_only_what_is_asked_for(model):
    arguments = {**batch(), "do_sample": False, "max_new_tokens": 3, "pad_token_id": 0, "return_dict_in_generate": True}
    with specdec.hf.enable(model, plain=True):
        assert model.generate(**arguments).scores is None
        out = model.generate(**arguments, output_logits=True)
        assert out.scores is None and len(out.logits) == 3
        assert isinstance(
            model.generate(**{**arguments, "return_dict_in_generate": False}, output_scores=True), torch.Tensor
        )
