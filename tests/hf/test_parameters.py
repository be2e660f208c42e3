"""Processors that become sampling parameters mean the same, to the last bit; those that would not are left as they are."""

import copy
import inspect

import pytest
import torch
from hf.prompts import PAD, an_end, batch, own
from support import VOCAB, params, tiny
from transformers.generation import LogitsProcessorList, logits_process

import specdec.hf
from specdec.hf.parameters import Parameters, translated
from specdec.kvpool import KVPool
from specdec.rows import Rows
from specdec.sequence import Sequence

ENDS = (5, 40)
PADDING = torch.tensor([0, 3, 1])

Penalty = logits_process.RepetitionPenaltyLogitsProcessor
Bias = logits_process.SequenceBiasLogitsProcessor
BadWords = logits_process.NoBadWordsLogitsProcessor
Suppress = logits_process.SuppressTokensLogitsProcessor
MinLength = logits_process.MinLengthLogitsProcessor
MinNew = logits_process.MinNewTokensLengthLogitsProcessor

LEAVES_PADDING_OUT = "Tensor" in str(inspect.signature(Penalty).parameters["prompt_ignore_length"].annotation)
"""Older versions of transformers penalise padding, so that a penalty after padding has no equal."""

EQUAL = {
    "penalty": [Penalty(1.7)],
    "penalty below one": [Penalty(0.6)],
    "biases": [Bias({(3,): 2.5, (9,): -1.25, (11,): float("-inf")})],
    "bad words": [BadWords([[4], [5], [1, 2], [2, 1, 2], [7, 7]], eos_token_id=5)],
    "suppressed": [Suppress([1, 2, VOCAB - 1, VOCAB + 7])],
    "lengths": [MinLength(12, [5, 40]), MinNew(6, 4, [40, 5])],
    "all in another order": [
        Suppress([3]),
        BadWords([[1, 2], [9]]),
        Penalty(1.3),
        MinNew(6, 3, [5, 40]),
        Bias({(3,): 2.0, (8,): 0.1}),
        Suppress([8]),
    ],
}
UNEQUAL = {
    "a bias before a penalty": [Bias({(3,): 2.5}), Penalty(1.7)],
    "two penalties": [Penalty(1.2), Penalty(1.2)],
    "two sums": [Bias({(3,): 0.1}), Bias({(3,): 0.2})],
    "a bias of two tokens": [Bias({(3, 4): 2.5})],
    "an infinite bias": [Bias({(3,): float("inf")})],
    "a token that is none": [Bias({(VOCAB,): 2.5})],
    "a bad word that is none": [BadWords([[1, VOCAB]])],
    "a word longer than the prompt": [BadWords([[1, 2, 3, 4, 5, 6, 7]])],
    "too many words": [BadWords([[a, b] for a in range(16) for b in range(17)])],
    "ends that are not the call's": [MinNew(6, 4, [5])],
    "part of the prompt": [Penalty(1.7, prompt_ignore_length=2)],
    "another kind": [logits_process.NoRepeatNGramLogitsProcessor(2)],
    "another kind between": [Penalty(1.7), logits_process.InfNanRemoveLogitsProcessor(), Suppress([3])],
}


def asked(padding=(0, 0, 0)):
    return Parameters(6, list(padding), ENDS, 9, VOCAB)


def adjusted(fields, prompts, outputs, logits):
    """What a round makes of `logits` [B, V], one row for each prompt and the tokens after it."""
    rows, pool = Rows(len(prompts), 32, 4, torch.device("cpu"), VOCAB), KVPool(32, 4)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        p = params(max_tokens=9, **fields)
        seq = Sequence(prompt, p, limit=len(prompt) + 9, eos=ENDS)
        seq.token_ids += output
        seq.table = pool.new_table()
        assert seq.table.grow(len(seq))
        rows.join(row, seq, 0)
    view = rows.view(torch.arange(len(prompts)), adjusted=True)
    return view.adjust(logits, view.num_tokens, torch.zeros(len(prompts), 0, dtype=torch.long))


@pytest.mark.parametrize("name", EQUAL)
def test_the_same_scores(name):
    """At every length that an output of nine tokens has, with few ids, so that words and repetitions come about."""
    draw = torch.Generator().manual_seed(len(name))
    ids = torch.randint(0, 12, (3, 15), generator=draw)
    fields = translated(EQUAL[name], asked())
    for length in range(6, 15):
        logits = torch.randn(3, VOCAB, generator=draw) * 3
        want = LogitsProcessorList(EQUAL[name])(ids[:, :length], logits)
        got = adjusted(fields, ids[:, :6].tolist(), ids[:, 6:length].tolist(), logits)
        assert torch.equal(got, want)
        assert not torch.equal(got, logits) or "lengths" in name and length >= 12


def test_the_same_scores_after_padding():
    """Where the penalty leaves padding out, and forbidden words have one token."""
    draw, mask = torch.Generator().manual_seed(3), torch.arange(9) >= PADDING[:, None]
    ids = torch.randint(1, 12, (3, 9), generator=draw).where(mask, PAD)
    processors = [BadWords([[4]]), MinNew(6, 4, [5, 40])]
    if LEAVES_PADDING_OUT:
        processors.append(Penalty(1.7, prompt_ignore_length=PADDING))
    fields = translated(processors, asked(PADDING.tolist()))
    logits = torch.randn(3, VOCAB, generator=draw)
    prompts = [row[n:6].tolist() for row, n in zip(ids, PADDING, strict=True)]
    want = LogitsProcessorList(processors)(ids, logits)
    assert torch.equal(adjusted(fields, prompts, ids[:, 6:].tolist(), logits), want)


@pytest.mark.parametrize("name", UNEQUAL)
def test_what_would_mean_something_else_has_no_equal(name):
    assert translated(UNEQUAL[name], asked()) is None


def test_what_would_look_at_padding_has_no_equal():
    left_out = [[Penalty(1.7, prompt_ignore_length=PADDING + 1)]] if LEAVES_PADDING_OUT else []
    for processors in ([Penalty(1.7)], [BadWords([[1, 2]])], *left_out):
        assert translated(processors, asked(PADDING.tolist())) is None


class Nothing(logits_process.LogitsProcessor):
    """Has no equal, and keeps all others from having one."""

    def __call__(self, input_ids, scores):
        return scores


CALLS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}
PARAMETERS = {
    **({"repetition_penalty": 1.4} if LEAVES_PADDING_OUT else {}),
    "suppress_tokens": [an_end(at=3)],
    "bad_words_ids": [[an_end(at=2)]],
    "min_new_tokens": 9,
    "eos_token_id": an_end(),
    "pad_token_id": PAD,
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_with_equals_stay_in_the_round(kind, monkeypatch):
    """The tokens are those of the processors themselves, and no processor runs; then none of it is left."""
    model, near = copy.deepcopy(tiny("llama")), copy.deepcopy(tiny("llama", noise=0.01))
    call = {**CALLS[kind], **PARAMETERS, "max_new_tokens": 12}
    with specdec.hf.enable(model, drafter=near, k=4):
        torch.manual_seed(7)
        want = model.generate(**batch(), **call, logits_processor=[Nothing()])
        with monkeypatch.context() as patch:
            patch.setattr("specdec.hf.session.ProcessedVerifier", None)
            torch.manual_seed(7)
            got = model.generate(**batch(), **call)
        assert torch.equal(got, want)
        assert torch.equal(model.generate(**batch(), do_sample=False, max_new_tokens=12), own())
    if kind == "greedy":
        assert torch.equal(got, own(**{**PARAMETERS}))
