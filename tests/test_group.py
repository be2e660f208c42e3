"""Rows that need the host inside a round beside rows that don't: rounds of their own, and plain decoding's tokens for all."""

import random

import pytest
from support import (
    Known,
    Processed,
    Request,
    assert_plain_until_cancelled,
    disturbed_step,
    engine,
    finish,
    odd_after_even,
    params,
    run,
    submit,
)

PROMPTS = [[5], [7, 8, 9, 10], [4, 9, 4, 9, 4, 9, 4, 9, 4], [1, 2, 3] * 7, [20] * 12]


def mixed(k=None, processor=odd_after_even, new=9):
    """Of two rows one is processed; of four one never drafts; greedy and sampled."""
    each = []
    for i, prompt in enumerate(PROMPTS):
        wish = dict(temperature=float(i % 3 > 0), seed=77 * i, k=0 if i % 4 == 2 else k)
        if i % 2:
            each.append(Processed(prompt, new, params(**wish, logits_processors=(processor,))))
        else:
            each.append(Request(prompt, new, params(**wish)))
    return each


@pytest.mark.parametrize(("drafter", "lag"), [("none", 1), ("lookup", 2), ("near", 1), ("right", 1), ("right", 2)])
def test_rows_of_two_groups(drafter, lag):
    """Each round holds rows of one group alone, and the host is behind all of them."""
    e = engine(drafter=drafter, k=3, rows=5, lag=lag)
    seen, read = set(), e._read

    def reading(flight):
        on_host = {bool(seq.processors) or (drafter == "right" and seq.params.k != 0) for seq in flight.seqs}
        assert on_host == {flight.group is e.split}
        assert flight.shape.processed == any(seq.processors for seq in flight.seqs)
        assert flight.step <= e._steps - lag or not e.scheduler.running
        seen.add(flight.group)
        read(flight)

    e._read = reading
    run(e, mixed())
    assert seen == set(e.groups)


@pytest.mark.parametrize("drafter", ["none", "near"])
def test_the_others_are_launched_before_the_host_waits(drafter):
    """While a processor works, the round of the rows that have none is on its way already."""
    asked = []

    def processor(ids, scores):
        rows = [seq for seq in e.scheduler.running if not seq.processors]
        launched = [f for f in e.flights if f.step == e._steps]
        assert [f.seqs for f in launched] == [rows] * bool(rows)
        asked.append(len(rows))
        return odd_after_even(ids, scores)

    each = mixed()
    for request in each:
        if request.seq.processors:
            request.seq.processors = (processor,)
    e = engine(drafter=drafter, k=3, rows=4, lag=1)
    run(e, each)
    assert max(asked) > 1


@pytest.mark.parametrize("lag", [0, 2])
def test_groups_are_made_anew_only_when_rows_come_or_go(lag):
    """What rows want of a round is looked at then alone; a round in flight keeps the rows that it was launched with."""
    e = engine(drafter="lookup", k=3, rows=4, lag=lag)
    held, kept = [], []
    for group in e.groups:
        hold = group.hold
        group.hold = lambda seqs, fixed, hold=hold: held.append(e.scheduler.changes) or hold(seqs, fixed)
    submit(e, mixed())
    while not e.idle:
        e.step()
        kept += [(f, f.seqs, list(f.seqs)) for f in e.flights if not any(f is g for g, *_ in kept)]
        assert all(set(g.seqs) == g.members and g.rows == [s.row for s in g.seqs] for g in e._parts())
        assert not e._apart or not any(s.processors for s in e.whole.seqs)
    assert all(f.seqs is seqs == before for f, seqs, before in kept)
    assert len(held) == 2 * len(set(held)), "twice for the same rows"


def test_a_drafter_in_python_is_asked_while_other_rows_run():
    e = engine(drafter="right", k=3, rows=4, lag=1)
    propose, asked = e.drafter.propose, []

    def proposing(rows, k):
        asked.append([f.group is e.whole for f in e.flights if f.step == e._steps])
        return propose(rows, k)

    e.drafter.propose = proposing
    run(e, [Request(p, 9, params(seed=i, k=(3, 0)[i % 2])) for i, p in enumerate(PROMPTS)])
    assert [True] in asked and all(found in ([True], []) for found in asked)
    assert e.stats.accepted == e.stats.drafted > 0


def test_where_the_host_does_not_run_ahead_all_rows_share_their_rounds():
    e = engine(drafter="near", k=3, rows=4)
    read = e._read

    def reading(flight):
        assert flight.group is e.whole
        shapes.add((flight.shape.processed, len(flight.seqs)))
        read(flight)

    shapes: set = set()
    e._read = reading
    run(e, mixed())
    assert (True, 4) in shapes


@pytest.mark.parametrize("drafter", ["lookup", "near", "right"])
def test_joining_leaving_and_preemption_at_random(drafter):
    for seed in range(2):
        rng = random.Random(seed)
        e = engine(drafter=drafter, k=4, blocks=rng.choice([16, 40]), budget=7, lag=1 + seed % 2)
        each: list[Request] = []
        for _ in range(30):
            if rng.random() < 0.3:
                each += submit(e, [rng.choice(mixed(new=rng.choice([3, 7])))])
            disturbed_step(e, rng, 0.1)
        finish(e)
        for r in each:
            assert_plain_until_cancelled(r)


def test_a_drafter_that_fails_between_rounds_of_others():
    e = engine(drafter="right", k=3, rows=4, lag=1)
    propose, left = e.drafter.propose, [3]

    def failing(rows, k):
        left[0] -= 1
        if left[0] < 0:
            raise KeyError("no draft")
        return propose(rows, k)

    e.drafter.propose = failing
    with pytest.warns(UserWarning, match="the drafter failed, decoding goes on without it"):
        run(e, mixed())
    assert e.drafter is None


@pytest.mark.parametrize("lag", [0, 1])
def test_policies_learn_from_rounds_with_processors(lag):
    """Such rows are drafted for with k="auto" too, and the tokens do not change."""
    e = engine(drafter="same", k=4, rows=5, lag=lag, adaptive=True)
    for group in e.groups:
        group.policy.costs = Known()
    each = [Request(PROMPTS[0], 20, params()), Processed(PROMPTS[1], 30, params(logits_processors=(odd_after_even,)))]
    run(e, each)
    assert all(r.seq.stats.drafted > 0 for r in each)
    assert not any(group.policy._rows for group in e.groups)
