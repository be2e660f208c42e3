"""Logits processors mean within rounds what they mean in transformers' own loop, also for drafts."""

import copy

import pytest
import torch
from hf.prompts import an_end, batch, own
from scipy import stats
from support import tiny
from transformers.generation import LogitsProcessor, LogitsProcessorList

import specdec.hf

GREEDY = {"do_sample": False, "max_new_tokens": 12}
END = {"eos_token_id": an_end(), "pad_token_id": 3}
PROCESSORS = {
    "min_new_tokens": {"min_new_tokens": 9, **END},
    "min_length": {"min_length": 28, **END},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[an_end(at=2)], [an_end(at=5), an_end(at=6)]]},
    "suppress_tokens": {"suppress_tokens": [an_end(at=3)], "begin_suppress_tokens": [an_end(at=0)]},
    "sequence_bias": {"sequence_bias": [[[an_end(at=1)], -50.0], [[7, 8], 9.0]]},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.8), **END},
    "renormalize_logits": {"renormalize_logits": True},
}


class RowBias(LogitsProcessor):
    """Depends on the place in the batch and on the whole row, padding included."""

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores) == 4
        rows = torch.arange(4)
        scores[rows, (input_ids.sum(1) + rows) % 97] += 30.0
        return scores


@pytest.fixture(scope="module")
def enabled(model):
    near = copy.deepcopy(tiny("llama", noise=0.01))
    with specdec.hf.enable(model, drafter=near, k=4) as enabled:
        yield enabled


@pytest.mark.parametrize("name", PROCESSORS)
def test_greedy_is_transformers_own(model, enabled, name):
    kwargs, before = PROCESSORS[name], enabled.session
    want = own(**kwargs)
    assert name == "renormalize_logits" or not torch.equal(want, own(**{k: kwargs[k] for k in END if k in kwargs}))
    assert torch.equal(model.generate(**batch(), **GREEDY, **kwargs), want)
    assert before is None or enabled.session is before
    assert torch.equal(model.generate(**batch(), **GREEDY), own()), "the next call has none of it"


def test_a_processor_of_ones_own_sees_whole_batches(model, enabled):
    want = own(logits_processor=LogitsProcessorList([RowBias()]))
    assert torch.equal(model.generate(**batch(), **GREEDY, logits_processor=[RowBias()]), want)


def test_allowed_tokens_by_prefix(model, enabled):
    def allowed(batch_id, input_ids):
        return [(int(input_ids[-1]) * 3 + i + batch_id) % 97 for i in range(20)]

    out = model.generate(**batch(), **GREEDY, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(out, own(prefix_allowed_tokens_fn=allowed))


def test_more_rows_than_places():
    model = copy.deepcopy(tiny("llama"))
    with specdec.hf.enable(model, plain=True, max_rows=3):
        kwargs = {"repetition_penalty": 1.7, "min_new_tokens": 12, **END}
        assert torch.equal(model.generate(**batch(), **GREEDY, **kwargs), own(**kwargs))


def test_assisted_calls_in_batches_have_processors(model, enabled):
    near = copy.deepcopy(tiny("llama", noise=0.02))
    for arguments in ({"assistant_model": near}, {"prompt_lookup_num_tokens": 4}):
        out = model.generate(**batch(), **GREEDY, repetition_penalty=1.7, **arguments)
        assert torch.equal(out, own(repetition_penalty=1.7))


def test_sampling_after_processors_follows_the_processed_distribution(model, enabled):
    """typical_p comes after top_k, so every filter runs as a processor. Chi-squared at 1e-6, the seed is fixed."""
    ids, count = torch.tensor([[5, 6, 7, 8]]), 250
    filters = {"do_sample": True, "max_new_tokens": 1, "temperature": 1.3, "top_k": 12, "typical_p": 0.8}
    torch.manual_seed(0)
    out = model.generate(ids, **filters, num_return_sequences=count)
    reference = tiny("llama").generate(ids, **filters, output_scores=True, return_dict_in_generate=True)
    p = reference.scores[0][0].softmax(-1).double()
    seen = torch.bincount(out[:, -1], minlength=97)
    assert seen[p == 0].sum() == 0 and (p > 0).sum() > 2
    assert stats.chisquare(seen[p > 0].numpy(), (p[p > 0] / p.sum() * count).numpy()).pvalue > 1e-6


def test_a_failing_processor_raises_its_own_error(model, enabled):
    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise ZeroDivisionError("by a processor")

    with pytest.raises(ZeroDivisionError, match="by a processor"):
        model.generate(**batch(), **GREEDY, logits_processor=[Failing()])
    assert torch.equal(model.generate(**batch(), **GREEDY), own())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_scores_of_another_dtype(model, enabled, dtype):
    def cast(input_ids, scores):
        return (scores * 0.5).to(dtype)

    out = model.generate(**batch(), **GREEDY, logits_processor=LogitsProcessorList([RowBias(), cast]))
    assert torch.equal(out, own(logits_processor=LogitsProcessorList([RowBias(), cast])))


@pytest.mark.parametrize("wrong", [lambda ids, scores: scores[:1], lambda ids, scores: None])
def test_what_is_no_scores_is_named(model, enabled, wrong):
    with pytest.raises(ValueError, match=r"logits_processor: expected scores of shape \[4, 97\] back, got"):
        model.generate(**batch(), **GREEDY, logits_processor=LogitsProcessorList([wrong]))


@pytest.mark.parametrize("beside", [{}, {"no_repeat_ngram_size": 2}])
def test_a_row_without_a_token_to_draw_says_what_its_logits_went_through(model, enabled, beside):
    with pytest.raises(FloatingPointError, match="no token") as raised:
        model.generate(**batch(), **GREEDY, suppress_tokens=list(range(97)), **beside)
    assert "SuppressTokensLogitsProcessor" in raised.value.__notes__[0]


def test_a_processor_with_state_is_left_to_transformers(model, enabled):
    with pytest.warns(UserWarning, match="guidance_scale="):
        out = model.generate(**batch(), **GREEDY, guidance_scale=1.5)
    assert torch.equal(out, own(guidance_scale=1.5))
