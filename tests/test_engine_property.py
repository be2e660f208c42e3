"""A random driver of the engine: admit, step, cancel, preempt, fork, reset and failures, all invariants after each step.

Below it, a case for each counter-example that the design's invariants name.
"""

import copy
import random

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import COMMON, DRAFTERS, VOCAB, Oracle, Request, assert_plain, engine, finish, params, submit, tiny
from watch import Watch

from specdec.draft import ModelDrafter
from specdec.engine import Engine, EngineConfig
from specdec.kvpool import KVPool
from specdec.model import PagedModel
from specdec.rows import Rows
from specdec.sequence import Status
from specdec.verify import CoupledVerifier

NEW = 14
_rng = random.Random(3)
_LONG = [_rng.randrange(VOCAB) for _ in range(20)]
TEXTS = (_LONG, _LONG[:9] + [_rng.randrange(VOCAB) for _ in range(11)], [4, 9] * 4 + [20] * 12)
LENGTHS = (1, 4, 5, 9, 13, 20)


class Injected(RuntimeError):
    """What the injected failures raise."""


class Raising:
    """A listener that fails at its n-th piece."""

    def __init__(self, n):
        self.left = n

    def emitted(self, seq, token_ids):
        self.left -= 1
        if self.left < 0:
            raise Injected("listener")
        return len(token_ids), False

    def finished(self, seq):
        pass


REQUESTS = st.fixed_dictionaries(
    {
        "text": st.integers(0, len(TEXTS) - 1),
        "length": st.sampled_from(LENGTHS),
        "new": st.integers(1, NEW),
        "k": st.none() | st.integers(0, 5),
        "temperature": st.sampled_from([1.0, 0.0]),
        "samples": st.integers(1, 2),
    }
)
INJECTIONS = ("blocks", "nan", "prompt", "round before", "round after", "drafter")


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        drafter=st.sampled_from(DRAFTERS),
        lag=st.integers(0, 2),
        blocks=st.sampled_from([9, 12, 20, 48]),
        budget=st.sampled_from([2, 7, 30]),
        requests=st.lists(REQUESTS, min_size=2, max_size=4),
    )
    def start(self, drafter, lag, blocks, budget, requests):
        self.engine = engine(drafter=drafter, lag=lag, blocks=blocks, budget=budget, k=4)
        self.watch = Watch(self.engine, drafter)
        self.live: list[Request] = []
        self.may_fail: set = set()  # sequences that an injected failure may have hit
        for request in requests:
            self._submit(request)
        self.step(4)

    def _submit(self, wish, fails_at=None):
        prompt, parent = TEXTS[wish["text"]][: wish["length"]], None
        p = params(wish["temperature"], seed=wish["text"], k=wish["k"])
        for index in range(wish["samples"] if p.noise else 1):
            request = Request(prompt, NEW, p, index=index)
            request.seq.limit = len(prompt) + wish["new"]
            request.seq.parent, parent = parent, parent or request.seq
            self.watch.full[request.seq] = request.full
            if isinstance(self.engine.drafter, Oracle):
                self.engine.drafter.known.append(request.known())
            if fails_at is not None:
                self.may_fail.add(request.seq)
            self.engine.submit(request.seq, None if fails_at is None else Raising(fails_at))
            self.live.append(request)

    @rule(request=REQUESTS, fails_at=st.none() | st.integers(0, 3))
    def admit(self, request, fails_at):
        self._submit(request, fails_at)

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()
            self.watch.check()

    @precondition(lambda self: self.engine.scheduler.sequences)
    @rule(data=st.data(), cancels=st.booleans())
    def disturb(self, data, cancels):
        """Cancel or preempt a sequence, and go on at once: rounds that it is in may be in flight."""
        if cancels:
            unfinished = [r.seq for r in self.live if r.seq.status is not Status.FINISHED]
            self.engine.cancel(data.draw(st.sampled_from(unfinished)))
        else:
            self.engine.scheduler.preempt(data.draw(st.sampled_from(self.engine.scheduler.sequences)))
        self.step(1)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data(), kind=st.sampled_from(INJECTIONS))
    def inject(self, data, kind):
        """One failure of invariant 6, at the next chance that the engine gives it."""
        if kind == "blocks":
            self._refuse_blocks(data.draw(st.integers(1, 3)))
        elif kind == "nan":
            self.watch.failing = self._nan_logits(data.draw(st.sampled_from(self.engine.scheduler.running)))
        elif kind != "drafter":
            self.watch.failing = self._failing_forward(kind)
        elif not isinstance(self.engine.drafter, ModelDrafter):
            self._failing_drafter()
        self.step(1)

    def _refuse_blocks(self, times):
        allocator, left = self.engine.pool.allocator, [times]
        vars(allocator).pop("allocate", None)
        allocate = allocator.allocate

        def refuse(n):
            left[0] -= n > 0
            if left[0] <= 0:
                vars(allocator).pop("allocate", None)
            return allocate(n) if n == 0 else None

        allocator.allocate = refuse

    def _nan_logits(self, chosen):
        def spoil(when, name, packed, logits):
            if name == "drafter" or when == "before":
                return logits
            tables = [[block for block in row if block >= 0] for row in packed.block_table.tolist()]
            here = (
                chosen.table is not None and chosen.table.blocks in tables
            )  # else in the round of another group, or over
            if here:
                at = tables.index(chosen.table.blocks)
                logits[packed.cu_seqlens_q[at] : packed.cu_seqlens_q[at + 1]] = float("nan")
                self.may_fail.add(chosen)
            if here or chosen not in self.engine.scheduler.running:
                self.watch.failing = None
            return logits

        return spoil

    def _failing_forward(self, during):
        def fail(when, name, packed, logits):
            if name == "target" and during == ("prompt" if logits is False else f"round {when}"):
                self.watch.failing = None
                self.may_fail.update(self.engine.scheduler.sequences)
                raise torch.OutOfMemoryError("injected")
            return logits

        return fail

    def _failing_drafter(self):
        def fail(rows, k):
            raise Injected("drafter")

        if self.engine.drafter:
            self.engine.drafter.propose = fail

    @precondition(lambda self: self.engine.idle)
    @rule()
    def reset_prefixes(self):
        self.engine.pool.allocator.reset_prefix_cache()

    @invariant()
    def everything_holds(self):
        if hasattr(self, "engine"):
            self.watch.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        vars(self.engine.pool.allocator).pop("allocate", None)
        self.watch.failing = None
        finish(self.engine)
        self.watch.check()
        for request in self.live:
            seq = request.seq
            if seq.finish_reason == "error":
                assert seq in self.may_fail, seq.error
                assert isinstance(seq.error, (Injected, FloatingPointError, torch.OutOfMemoryError)), seq.error
            elif seq.finish_reason != "cancelled" or not seq.cancelled:
                assert (seq.finish_reason, seq.token_ids) == ("length", request.full[: seq.limit])


TestEngine = EngineMachine.TestCase
# The drafter's failure warns, as it should.
TestEngine.pytestmark = [pytest.mark.filterwarnings("ignore:the drafter failed")]
TestEngine.settings = settings(
    max_examples=35,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


# -- the counter-examples that the design's invariants name


def watched(kind="none", **options):
    e = engine(drafter=kind, **options)
    return e, Watch(e, kind)


def finish_watched(e, watch, steps=500):
    for _ in range(steps):
        if e.idle:
            break
        e.step()
        watch.check()
    finish(e)


def go(e, watch, requests):
    """Run to the end; every step is looked at, and every output is plain decoding's."""
    watch.full.update({r.seq: r.full for r in requests})
    submit(e, requests)
    finish_watched(e, watch)
    for request in requests:
        assert_plain(request)
    return requests


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_block_of_the_newest_token_is_never_hashed(length, lag):
    """Invariant 3: at every length, block edges among them, exactly the full blocks before the newest token are found."""
    e, watch = watched("right", k=3, lag=lag)
    request = Request(_LONG[:length], NEW, params(k=3))
    watch.full[request.seq] = request.full
    submit(e, [request])
    while not e.idle:
        e.step()
        watch.check()
        published = sum(e.pool.allocator.is_published(b) for b in range(e.pool.num_blocks))
        assert published <= (len(request.seq) - 1) // 4
    assert_plain(request)
    assert published == (length + NEW - 1) // 4


@pytest.mark.parametrize("length", range(1, 14))
def test_a_hit_leaves_the_newest_token_to_run(length):
    """Invariant 3: a hit covers at most (l - 1) // block_size blocks, whatever longer text is cached."""
    e, watch = watched(k=0)
    full = go(e, watch, [Request(_LONG[:3], NEW, params())])[0].full
    hit = go(e, watch, [Request(full[:length], 4, params())])[0].seq
    assert hit.stats.cached_tokens == (length - 1) // 4 * 4


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("kind", ["none", "near", "right"])
def test_what_a_round_in_flight_emits_for_a_preempted_sequence_is_kept(kind, lag):
    """It is not admitted again before that round is read: its tokens and its KV would be those of two pasts."""
    for at in range(2, 8):
        e, watch = watched(kind, k=3, lag=lag)
        each = [Request(_LONG[:5], NEW, params(k=3)), Request(_LONG[5:9], NEW, params(1.0, seed=1, k=3))]
        watch.full.update({r.seq: r.full for r in each})
        submit(e, each)
        for _ in range(at):
            e.step()
        if each[1].seq.row is not None:
            e.scheduler.preempt(each[1].seq)
        finish_watched(e, watch)
        for request in each:
            assert_plain(request)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", ["same", "near"])
def test_shared_blocks_are_filled_for_the_drafter_once(kind, lag):
    """Invariant 4: a prompt without a drafter, then twice at once with one: one writer, acceptance as when cold."""
    p, plain_p = params(1.0, seed=5, k=4), params(1.0, seed=5, k=0)
    e, watch = watched(kind, k=4, lag=lag)
    cold = go(e, watch, [Request(_LONG, NEW, p)])[0].seq.stats.accepted_per_round
    for budget in (3, 16, 100):
        e, watch = watched(kind, k=4, lag=lag, budget=budget)
        go(e, watch, [Request(_LONG, NEW, plain_p)])
        assert e.stats.drafter_tokens == 0
        both = go(e, watch, [Request(_LONG, NEW, p), Request(_LONG, NEW, p)])
        assert e.stats.prompt_tokens == 19 + 2 * 3  # of each, what follows the last full block
        assert e.stats.drafter_tokens == 16 + 2 * 3
        assert [r.seq.stats.cached_tokens for r in both] == [16, 16]
        assert [r.seq.stats.accepted_per_round for r in both] == [cold, cold]


@pytest.mark.parametrize("kind", ["same", "near"])
def test_completeness_ends_with_eviction(kind):
    """Invariant 4: a block that was evicted and published anew without a drafter is incomplete for the drafter."""
    e, watch = watched(kind, k=4, blocks=9)
    go(e, watch, [Request(_LONG, NEW, params(k=4))])
    go(e, watch, [Request(list(reversed(_LONG)), NEW, params(k=0))])  # evicts everything
    go(e, watch, [Request(_LONG, NEW, params(k=0))])
    before = e.stats.drafter_tokens
    go(e, watch, [Request(_LONG, NEW, params(k=4))])
    assert e.stats.drafter_tokens == before + 19


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("kind", ["same", "near", "random"])
def test_accepted_counts_are_those_of_a_draft_loop_without_a_cache(kind, lag):
    """Invariant 7, for rows that join and leave, mixed k, prefix hits, forks and preemption; see Watch."""
    e, watch = watched(kind, k=4, lag=lag, blocks=13, budget=9)
    each = [
        Request(TEXTS[i % 3][: 5 + 2 * i], NEW, params(float(i % 2), seed=i, k=(4, 1, 3, 0, 2)[i % 5]))
        for i in range(7)
    ]
    forks = [Request(_LONG[:11], NEW, params(1.0, seed=9, k=3), index=i) for i in range(3)]
    for fork in forks[1:]:
        fork.seq.parent = forks[0].seq
    go(e, watch, each + forks)
    assert sum(r["num_drafts"] for r in watch.rounds) > 50
    assert e.scheduler.preemptions > 0


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_copy_of_the_target_has_every_wanted_draft_granted_and_accepted(k):
    """Invariant 7: with room, each round drafts min(k, what is left to emit less one), and all of it is right."""
    e, watch = watched("same", k=k)
    request = go(e, watch, [Request(_LONG, NEW, params(1.0, seed=2, k=k))])[0]
    left, drafts = NEW, []
    while left:
        drafts.append(min(k, left - 1))
        left -= drafts[-1] + 1
    assert [r["num_drafts"] for r in watch.rounds if r["ran"]] == drafts
    assert [r["num_accepted"] for r in watch.rounds if r["ran"]] == drafts
    assert request.seq.stats.acceptance_rate == (1.0 if sum(drafts) else 0.0)


def test_a_row_that_joins_with_no_drafts_keeps_its_drafter_warm():
    """A row with room for no draft writes its newest token for the drafter all the same: the next drafts are right."""
    e, watch = watched("same", k=3)
    go(e, watch, [Request(_LONG[:n], new, params(k=3)) for n, new in ((9, 2), (9, 14), (12, 3), (1, 14))])
    assert e.stats.accepted == e.stats.drafted


def drafted_by(config, lag):
    """An engine whose draft model is a random one of `config`."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    pool = KVPool(64, 4, poison=True)
    target = PagedModel(copy.deepcopy(tiny()), pool, "target")
    drafter = ModelDrafter(PagedModel(model, pool, "drafter"), vocab_size=VOCAB)
    rows = Rows(4, 96, 4, torch.device("cpu"), 97)
    e = Engine(target, CoupledVerifier(VOCAB), rows, drafter, EngineConfig(k=3, prompt_budget=16, lag=lag))
    return e, Watch(e, "another")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("vocab", [60, 96, 98, 200])
def test_no_id_outside_the_drafters_embedding_reaches_it(vocab, lag):
    """Invariant 5, see Watch: drafters with fewer and with more embedding rows than the target."""
    e, watch = drafted_by(transformers.LlamaConfig(**{**COMMON, "vocab_size": vocab}), lag)
    each = [Request([95, 96, 94, i], NEW, params(1.0, seed=i, k=3)) for i in range(4)]
    go(e, watch, each)
    assert any(t >= 60 for r in each for t in r.seq.output_ids)
    assert e.stats.drafted > 0
    assert e.drafter is not None
