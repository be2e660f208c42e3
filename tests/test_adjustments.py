"""Adjusted logits in whole rounds: whoever drafts, the tokens are those of plain decoding through transformers' processors."""

import pytest
import torch
from support import VOCAB, Request, engine, params, run, submit

from specdec.adjustments import bias_of

EOS = (5, 40)
KINDS = (
    {},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.8, "presence_penalty": 1.5},
    {"frequency_penalty": 0.9, "presence_penalty": -0.4},
    {"logit_bias": {5: 1.5, 8: float("-inf"), 21: 4.0}, "frequency_penalty": 1.5},
    {"allowed_token_ids": tuple(range(3, 30)), "repetition_penalty": 1.2},
    {"bad_words": ((21, 21), (8,), (3, 4, 5), (21,)), "logit_bias": {3: 9.0, 4: 9.0, 5: 9.0, 21: 9.0}},
    {"min_tokens": 9, "stop_token_ids": (7, 21), "logit_bias": {5: 6.0, 7: 6.0, 21: 6.0}},
    {"min_tokens": 5, "repetition_penalty": 1.3, "bad_words": ((1, 2),), "logit_bias": {1: 3.0}, "top_k": 9},
)


def requests(new=14):
    """Every kind, greedy and sampled by turns, with prompts that repeat themselves, so that look-up drafts."""
    return [
        Request([1 + i, 2, 3, 1 + i, 2, 3, 1 + i], new, params(0.9 * (i % 2), seed=i, **kind), eos=EOS)
        for i, kind in enumerate(KINDS)
    ]


@pytest.mark.parametrize("drafter", ["none", "lookup", "near", "right", "wrong"])
def test_every_kind_in_one_batch(drafter):
    """Nine rows through four places: they join and leave in the middle of each other's rounds."""
    run(engine(drafter=drafter, k=3, rows=4, blocks=96), requests())


def test_the_host_behind_and_too_few_blocks():
    """Rounds in flight count what they emit themselves, and a preempted row is counted anew."""
    e = engine(drafter="lookup", k=3, rows=4, blocks=13, lag=2)
    run(e, requests())
    assert e.scheduler.preemptions > 0


def test_a_copy_of_the_target_is_always_right():
    """The drafter's logits are adjusted as the target's are."""
    e = engine(drafter="same", k=3, rows=9, blocks=200)
    done = run(e, requests())
    # A row that ends in the middle of its drafts accepts fewer than it drafted, whoever drafts.
    assert all(r.seq.stats.acceptance_rate == 1.0 for r in done if r.seq.finish_reason == "length")
    assert sum(r.seq.finish_reason == "length" for r in done) > 4


def test_rows_that_want_nothing_cost_nothing():
    e = engine(drafter="lookup")
    run(e, [Request([1, 2, 3], 6)])
    assert e.rows._adjustments is None
    submit(e, [Request([1, 2, 3], 6), Request([1, 2, 3], 3, params(repetition_penalty=1.5))])
    shapes = []
    while not e.idle:
        if e.scheduler.running:
            shapes.append(e._parts()[0].shape(0, None).adjusted)
        e.step()
    assert shapes == sorted(shapes, reverse=True) and True in shapes and False in shapes


def test_tables_that_do_not_fit_fail_their_own_row(monkeypatch):
    e = engine(rows=2)
    monkeypatch.setattr(e.rows, "vocab_size", -1)
    fine, bad = submit(e, [Request([1, 2, 3], 6), Request([1, 2, 3], 6, params(repetition_penalty=1.5))])
    e.run()
    assert isinstance(bad.seq.error, RuntimeError) and bad.seq.finish_reason == "error"
    assert fine.seq.token_ids == fine.want
    assert e.pool.allocator.num_free == e.pool.num_blocks


def test_bias_adds_up():
    p = params(logit_bias={3: 2.0, 4: 1.0}, allowed_token_ids=(3, 9), bad_words=((9,), (1, 2)))
    bias = bias_of(p, VOCAB)
    assert bias[3] == 2.0 and (bias[torch.arange(VOCAB) != 3] == -torch.inf).all()
