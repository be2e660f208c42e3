"""Logits processors of requests: any that is a function of its arguments gives plain decoding's tokens, whoever drafts."""

import pytest
import torch
from support import VOCAB, Processed, engine, odd_after_even, params, run, submit
from transformers.generation import logits_process

KINDS = (
    (),
    (logits_process.NoRepeatNGramLogitsProcessor(2),),
    (odd_after_even,),
    (logits_process.TemperatureLogitsWarper(0.5), logits_process.NoRepeatNGramLogitsProcessor(3), odd_after_even),
)


def requests():
    return [
        Processed([1 + i, 2, 3, 1 + i, 2, 3], 10, params(t, seed=2 * i + (t > 0), logits_processors=kind))
        for i, kind in enumerate(KINDS)
        for t in (0.0, 0.9)
    ]


@pytest.mark.parametrize(("drafter", "lag"), [("none", 0), ("lookup", 2), ("same", 1), ("right", 0), ("wrong", 1)])
def test_rows_with_and_without_processors_in_one_batch(drafter, lag):
    e = engine(drafter=drafter, k=3, rows=5, lag=lag)
    done = run(e, requests())
    if drafter == "right":
        assert all(r.seq.stats.acceptance_rate == 1.0 for r in done)


def broken(ids, scores):
    if ids.shape[1] >= 10:
        raise KeyError("no such thing")
    return scores


@pytest.mark.parametrize(("drafter", "lag"), [("none", 1), ("same", 0), ("wrong", 1)])
def test_a_processor_that_fails_ends_its_own_row(drafter, lag):
    """Where plain decoding would get there: a draft past that place may be asked about before."""
    e = engine(drafter=drafter, k=3, rows=5, lag=lag)
    fine = Processed([1, 2, 3], 12, params(logits_processors=(odd_after_even,)))
    first, second, third = (Processed([i, 2, 3], 12, params()) for i in (4, 5, 6))
    first.seq.processors = (broken,)
    second.seq.processors = (lambda ids, scores: scores[0] if ids.shape[1] == 7 else scores,)
    third.seq.processors = (lambda ids, scores: scores - torch.inf if ids.shape[1] == 8 else scores,)
    submit(e, [fine, first, second, third])
    e.run()
    assert fine.seq.token_ids == fine.want and fine.seq.error is None
    assert isinstance(first.seq.error, KeyError) and first.seq.token_ids == first.want[:10]
    assert second.seq.token_ids == second.want[:7]
    assert str(second.seq.error) == f"logits_processors: expected scores of shape [1, {VOCAB}] back, got [{VOCAB}]"
    assert third.seq.token_ids == third.want[:8]
    assert "logits_processors: expected scores that leave a token to draw" in str(third.seq.error)
    assert e.pool.allocator.num_free == e.pool.num_blocks
