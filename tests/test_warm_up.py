"""Warming up leaves graphs and measured times behind, and nothing else."""

import pytest
from support import VOCAB, Request, engine, params, run, submit, tiny

from specdec import LLM
from specdec.policy import Survival
from specdec.stats import EngineStats
from specdec.warm_up import batches, warm_up


@pytest.mark.parametrize("drafter", ["near", "lookup"])
def test_every_shape_is_measured_and_nothing_else_is_left(drafter):
    e = engine(drafter=drafter, k=2, lag=1, adaptive=True)
    warm_up(e, [1, 4], [params()])
    for n in (1, 4):
        assert e.whole.policy.costs.plain(n) is not None
        for steps, bucket in e.whole.policy.shapes(n) if drafter == "near" else ():
            assert (n, steps, bucket) in e.whole.policy.costs._seconds
    assert e.stats == EngineStats() and e.idle and e.pool.allocator.num_free == e.pool.num_blocks
    assert e.whole.policy.pooled.rates(1) == Survival(0.9, 1).rates(1), "drafts of random text teach nothing"
    assert e.whole.policy.trial.open(0) and not e.whole.policy._rows
    run(e, [Request([7, 8, 9, 10], 12, params(seed=i)) for i in range(4)])


def test_rows_that_never_fit_the_pool_at_once_are_left_out():
    e = engine(drafter="near", k=2, lag=1, blocks=3, adaptive=True)
    warm_up(e, [1, 4], [params()])
    assert e.whole.policy.costs.plain(1) is not None and e.whole.policy.costs.plain(4) is None


def test_a_round_that_fails_is_told():
    e = engine(drafter="none", k=0)
    e.round.run = lambda index, shape: 1 / 0
    with pytest.raises(RuntimeError, match="warm_up: a round of 2 rows failed: ZeroDivisionError"):
        warm_up(e, [2], [params()])


def test_it_waits_for_no_requests():
    e = engine(drafter="none", k=0)
    submit(e, [Request([1, 2, 3], 4)])
    with pytest.raises(RuntimeError, match="warm_up: requests are running"):
        warm_up(e, [1], [params()])


def test_numbers_of_rows():
    assert batches(False, 8) == [] and batches([], 8) == []
    assert batches(True, 8) == [1, 2, 4, 8] and batches(True, 6) == [1, 2, 4, 6] and batches(True, 1) == [1]
    assert batches([4, 1, 4], 8) == [1, 4]
    with pytest.raises(TypeError, match="warm_up: expected a bool or a list of numbers of rows, got 'all'"):
        batches("all", 8)
    with pytest.raises(ValueError, match="warm_up: expected numbers from 1 to max_rows, 8, got \\[16\\]"):
        batches([16], 8)


def test_llm_warms_up_before_its_first_request():
    model = tiny()
    with LLM(model, drafter="lookup", max_rows=2, max_model_len=96, seed=3) as llm:
        want = llm.generate([[1, 2, 3, VOCAB - 1]])[0].token_ids
    with LLM(model, drafter="lookup", max_rows=2, max_model_len=96, seed=3, warm_up=True) as llm:
        assert llm.engine.whole.policy.costs.plain(2) is not None
        assert llm.stats.rounds == 0
        assert llm.generate([[1, 2, 3, VOCAB - 1]])[0].token_ids == want
