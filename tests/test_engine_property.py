"""A random driver of the engine: admit, step, cancel, preempt, fork, reset and failures, all invariants after each step."""

import functools

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import DRAFTERS, Oracle, Request, engine, params

from specdec.sequence import Status

PROMPTS = ([5], [7, 8, 9, 10], [7, 8, 9, 10, 11, 3, 4], [4, 9, 4, 9, 4, 9, 4, 9], [1, 2, 3] * 5, [20] * 12)


@functools.lru_cache(None)
def reference(prompt: int, temperature: float, seed: int, index: int) -> Request:
    return Request(list(PROMPTS[prompt]), 14, params(temperature, seed=seed), index=index)


class Raising:
    """A listener that fails at its n-th piece."""

    def __init__(self, n):
        self.left = n

    def emitted(self, seq, token_ids):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("listener")
        return len(token_ids), False

    def finished(self, seq):
        pass


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        drafter=st.sampled_from(DRAFTERS),
        lag=st.integers(0, 2),
        blocks=st.sampled_from([10, 16, 40]),
        budget=st.sampled_from([2, 7, 30]),
    )
    def start(self, drafter, lag, blocks, budget):
        self.engine = engine(drafter=drafter, lag=lag, blocks=blocks, budget=budget, k=4)
        if isinstance(self.engine.drafter, Oracle):
            self.engine.drafter.known += [
                reference(p, t, s, i).known()
                for p in range(len(PROMPTS))
                for t in (0.0, 1.0)
                for s in (0, 1)
                for i in (0, 1)
            ]
        self.live: list[tuple] = []
        self.sealed: dict = {}

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        new=st.integers(1, 14),
        k=st.integers(0, 4),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 1),
        samples=st.integers(1, 2),
        fails_at=st.none() | st.integers(0, 3),
    )
    def admit(self, prompt, new, k, temperature, seed, samples, fails_at):
        parent = None
        for index in range(samples):
            known = reference(prompt, temperature, seed, index)
            request = Request(list(PROMPTS[prompt]), new, params(temperature, seed=seed, k=k), index=index)
            request.seq.parent, parent = parent, parent or request.seq
            self.engine.submit(request.seq, None if fails_at is None else Raising(fails_at))
            self.live.append((request.seq, known.full))

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()
            self.everything_holds()

    @precondition(lambda self: self.engine.scheduler.sequences)
    @rule(data=st.data())
    def cancel(self, data):
        self.engine.cancel(data.draw(st.sampled_from(self.engine.scheduler.sequences)))

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.engine.scheduler.preempt(data.draw(st.sampled_from(self.engine.scheduler.running)))

    @precondition(lambda self: self.engine.idle)
    @rule()
    def reset_prefixes(self):
        self.engine.pool.allocator.reset_prefix_cache()
        self.sealed.clear()

    @rule()
    def refuse_a_block_once(self):
        allocator = self.engine.pool.allocator

        def refuse(n):
            vars(allocator).pop("allocate")
            return None if n else []

        vars(allocator)["allocate"] = refuse

    @invariant()
    def everything_holds(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        for seq, full in self.live:
            assert seq.token_ids == full[: len(seq)], "not what plain decoding gives"
        self._sealed_blocks_stay()

    def _sealed_blocks_stay(self):
        """Invariants 3 and 4: what is published never changes while it is, and holds no NaN."""
        pool, now = self.engine.pool, {}
        for block in range(pool.num_blocks):
            if not pool.allocator.is_published(block):
                continue
            key = pool.allocator.key_of(block)
            target = torch.cat([t[block].flatten() for pair in pool.kv("target") for t in pair])
            assert not target.isnan().any(), f"published block {block} has a hole"
            if self.sealed.get(block, (None,))[0] == key:
                assert torch.equal(self.sealed[block][1], target), f"published block {block} was rewritten"
            now[block] = (key, target)
        self.sealed = now

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        vars(self.engine.pool.allocator).pop("allocate", None)
        for _ in range(600):
            if self.engine.idle:
                break
            self.engine.step()
            self.engine.check()
        assert self.engine.idle, "no progress"
        assert self.engine.pool.allocator.num_free == self.engine.pool.num_blocks
        for seq, full in self.live:
            assert seq.status is Status.FINISHED
            if seq.finish_reason == "length":
                assert seq.token_ids == full[: seq.limit]
            else:
                assert seq.finish_reason in ("cancelled", "error")


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
