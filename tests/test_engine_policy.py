"""The engine under a policy: the output does not depend on what it plans, and useless drafters are left alone."""

import random

import pytest
from support import Known, Request, engine, params, run

from specdec.policy import Plan, Policy

PROMPTS = [[5], [7, 8, 9, 10], [4, 9, 4, 9, 4, 9, 4, 9, 4], [1, 2, 3] * 7, [20] * 12]


def requests(new=18, k=None):
    """k None: the policy's to decide; the third has a k of its own, and the fourth never drafts."""
    each = enumerate(PROMPTS)
    return [Request(p, new, params(float(i % 2), seed=i, k={2: 2, 3: 0}.get(i, k))) for i, p in each]


class Hostile(Policy):
    """Plans at random: any number of steps, drafts for any rows, with the drafter caught up or not."""

    def __init__(self, k, seed, **kwargs):
        super().__init__(k, **kwargs)
        self.random = random.Random(seed)

    @property
    def resting(self):
        return self.random.random() < 0.5

    def plan(self, rows, batch, pledged=0.0):
        chosen = [key for key in rows.keys if self.random.random() < 0.6]
        drafts = {key: self.random.randint(1, self.k) for key in chosen}
        late = frozenset(key for key in chosen if self.random.random() < 0.5)
        return Plan(self.random.randint(max(drafts.values(), default=0), self.k), drafts, late)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("drafter", ["lookup", "near", "same", "right"])
def test_any_plan_gives_the_same_tokens(drafter, lag):
    """With preemption by a small pool for some."""
    for seed in range(2):
        e = engine(drafter=drafter, k=5, lag=lag, blocks=24 if seed else 64, adaptive=True)
        for group in e.groups:
            group.policy = Hostile(5, seed, stepped=drafter != "lookup")
        run(e, requests())
        assert e.stats.drafted > 0
        if drafter in ("same", "right"):
            assert e.stats.accepted == e.stats.drafted


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafter", ["lookup", "near"])
def test_plans_by_the_clock_give_the_same_tokens(drafter, lag):
    run(engine(drafter=drafter, k=5, lag=lag, adaptive=True), requests())


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("drafter", ["wrong", "random", "right", "same"])
def test_only_a_good_drafter_is_used(drafter, lag):
    e = engine(drafter=drafter, k=4, lag=lag, adaptive=True)
    for group in e.groups:
        group.policy.costs = Known()
    each = run(e, [Request(p, 70, params(seed=i)) for i, p in enumerate(PROMPTS[:3])])
    drafted = max(r.seq.stats.drafted for r in each)
    if drafter in ("wrong", "random"):
        assert 0 < drafted <= 5
        assert e.stats.drafter_tokens < 70
    else:
        assert e.stats.accepted == e.stats.drafted
        assert e.stats.acceptance_length > 3


def test_a_good_drafter_runs_every_token_once_whatever_ran_before():
    """Without drafts, with a fixed number of them, then by choice: it is filled along with prompts, and stays in step.

    On a GPU a forward to catch up takes two rounds. Rows join in chunks, so some draft while prompts are extended.
    """
    e = engine(drafter="same", k=4, lag=1, adaptive=True)
    e.whole.policy.costs = Known()
    for k in (0, 4, None):
        e.reset_prefix_cache()
        before = e.stats.drafter_tokens
        each = run(e, [Request(p, 40, params(seed=i, k=k)) for i, p in enumerate(PROMPTS[1:4])])
        prompts = sum(len(r.seq.token_ids[: r.seq.prompt_len]) - 1 for r in each)
        assert e.stats.drafter_tokens - before == (0 if k == 0 else prompts)
    assert all(r.seq.stats.acceptance_length > 3 for r in each)


def test_a_drafter_that_fails_takes_its_policy_along():
    class Broken:
        def propose(self, rows, k):
            raise RuntimeError("broken")

    e = engine(drafter="wrong", k=4, adaptive=True)
    for group in e.groups:
        group.policy.costs = Known()
    e.drafter = e.round.drafter = Broken()
    with pytest.warns(UserWarning, match="the drafter failed"):
        run(e, requests())
    assert [group.policy for group in e.groups] == [None, None]
    run_, shapes = e.round.run, []
    e.round.run = lambda index, shape: shapes.append(shape) or run_(index, shape)
    run(e, requests())
    assert shapes and not any(shape.draft_steps for shape in shapes), "no round has room for drafts that nobody makes"


def test_the_policy_forgets_sequences_that_are_over():
    e = engine(drafter="right", k=4, lag=1, adaptive=True)
    run(e, requests())
    assert not any(group.policy._rows for group in e.groups)


def test_without_a_policy_nothing_is_kept_for_one():
    """Forwards of the drafter are timed for the policy alone; with a fixed k nobody would take the times away."""
    e = engine(drafter="near", k=3)
    run(e, requests(k=3))
    assert e.stats.drafter_tokens > 0 and e._catch_ups == []
