"""Where a round's time goes: draft, verify, sample, the rest of the round, the host, an idle device.

A pass of its own, so that the measured runs carry no clocks; its parts are then scaled to the round that was measured.
On a CPU each part is timed as it is called. On a GPU some rounds run as they were measured under the profiler, which
tells how long the device had work, then some step by step, which tell for which part.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from specdec.bench.stand import Arm, Job, Stand
from specdec.bench.steps import StepClock
from specdec.bench.timeline import MARK, Copied, Timeline
from specdec.buckets import Buckets
from specdec.engine import Engine
from specdec.graphs import padded
from specdec.round import Round, RoundResult, RoundShape
from specdec.sequence import Sequence, Status

ROUNDS = 16
"""Rounds that are looked at, half of them in either way on a GPU; the shares settle within a few."""
_UNSETTLED = 0.25
"""Of a recording, left out: the first rounds under a profiler are slow."""


@dataclass(frozen=True)
class Split:
    """Milliseconds of a round; together they are the round as measured without clocks.

    other: packing, acceptance and bookkeeping. host: scheduler and detokenizer; on a GPU they work beside the device, and
    host is what it waits between two rounds. idle: what it has no work for within a round; 0 on a CPU.
    copied: bytes of a round; None on a CPU, which copies nothing.
    """

    draft_ms: float
    verify_ms: float
    sample_ms: float
    other_ms: float
    host_ms: float
    idle_ms: float
    copied: Copied | None = None

    @classmethod
    def scaled(cls, parts: list[float], round_ms: float) -> Split:
        """Of parts (in the order of the fields, idle left out) as another pass found them.

        What they lack of the round is idle time; where they exceed it, because that pass was slower, all shrink alike.
        """
        known = [max(0.0, part) for part in parts]
        shrink = min(1.0, round_ms / sum(known)) if sum(known) else 1.0
        draft, verify, sample, other, host = (part * shrink for part in known)
        return cls(draft, verify, sample, other, host, idle_ms=max(0.0, round_ms - shrink * sum(known)))


class _Sections:
    """Within it, the calls of a round's parts are timed (CPU) or marked for the profiler (GPU)."""

    def __init__(self, engine: Engine, cuda: bool):
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._cuda = cuda
        self._parts = [(engine.round, "run"), (engine.round.target, "extend"), (engine.round.verifier, "accept")]
        if engine.round.drafter is not None:
            self._parts.append((engine.round.drafter, "propose"))

    def __enter__(self) -> _Sections:
        for owner, name in self._parts:
            setattr(owner, name, self._wrapped(name, getattr(owner, name)))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for owner, name in self._parts:
            delattr(owner, name)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        def marked(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(f"{MARK}{name}"):
                return call(*args, **kwargs)

        return marked if self._cuda else timed


class StepByStep:
    """In the place of a `RoundGraphs`. A round counts as a capture, so that no policy learns from what it takes.

    buckets: of the graphs that were measured, whose sizes the rounds get: of other sizes layers would be compiled anew. None
    where there were none.
    """

    def __init__(self, round_: Round, buckets: Buckets | None):
        self.round, self.buckets, self.captures = round_, buckets, 0

    def run(self, rows: list[int], shape: RoundShape) -> RoundResult:
        self.captures += 1
        bucket = len(rows)
        if self.buckets:
            bucket, shape = self.buckets.choose(len(rows), shape, elastic=self.round.elastic)
        return self.round.run(padded(rows, bucket).to(self.round.rows.device), shape)


def split(stand: Stand, arm: Arm, job: Job, round_ms: float) -> Split | None:
    """Run some rounds of the job and tell their parts apart; None if it ends before a round of decoding alone.

    round_ms: of a round as measured without clocks. Raises MethodFailed for whatever goes wrong.
    """
    engine, seqs = stand.engine(arm.method), stand.sequences(arm, job)
    cuda = stand.device.type == "cuda"
    engine.reset_prefix_cache()
    graphs = engine.graphs
    try:
        for seq in seqs:
            engine.submit(seq)
        while any(seq.status in (Status.WAITING, Status.EXTENDING) for seq in seqs):
            engine.step()
        found = _on_gpu(engine, round_ms) if cuda else _on_cpu(engine, seqs, round_ms)
        for seq in seqs:
            engine.cancel(seq)
        engine.run()
    except Exception as error:
        raise stand.give_up(arm.method, error) from error
    finally:
        engine.graphs = graphs
    return found


def _on_cpu(engine: Engine, seqs: list[Sequence], round_ms: float) -> Split | None:
    """The host is the device and never idle, so the shares are what was found, of the measured round."""
    total, steps = 0.0, 0
    with _Sections(engine, cuda=False) as sections:
        clock = StepClock(engine, seqs)
        while steps < ROUNDS and not engine.idle:
            total += clock.step().seconds
            steps += 1
    if not steps:
        return None
    seconds = sections.seconds
    parts = seconds["propose"] + seconds["extend"] + seconds["accept"]
    each = (seconds["propose"], seconds["extend"], seconds["accept"], seconds["run"] - parts, total - seconds["run"])
    return Split.scaled([round_ms * part / total for part in each], round_ms)


def _on_gpu(engine: Engine, round_ms: float) -> Split | None:
    """None as well if a graph had to be captured meanwhile: such rounds are not those that were measured."""
    captures = engine.graphs.captures if engine.graphs else 0
    whole, rounds = _recorded(engine)
    if not rounds or (engine.graphs and engine.graphs.captures > captures):
        return None
    step_by_step: Any = StepByStep(engine.round, engine.graphs.buckets if engine.graphs else None)
    engine.graphs = step_by_step
    with _Sections(engine, cuda=True):
        parts, _ = _recorded(engine)
    return of_timelines(whole, parts, rounds, round_ms)


def of_timelines(whole: Timeline, stepped: Timeline, rounds: int, round_ms: float) -> Split | None:
    """whole: `rounds` rounds as they were measured; stepped: some step by step, marked. None without either's work."""
    settled, work = whole.later(_UNSETTLED), [stepped.busy_us(part) for part in ("propose", "extend", "accept", "run")]
    if not settled.whole_us or not sum(work):
        return None
    busy = round_ms * settled.busy_us() / settled.whole_us
    waiting = round_ms * settled.waiting_us / settled.whole_us
    split = Split.scaled([*(busy * part / sum(work) for part in work), waiting], round_ms)
    return replace(split, copied=whole.copied(rounds))


def _recorded(engine: Engine) -> tuple[Timeline, int]:
    """The device's work in the next rounds, and how many they were."""
    torch.cuda.synchronize()
    rounds = engine.stats.rounds
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        while engine.stats.rounds - rounds < ROUNDS // 2 and not engine.idle:
            engine.step()
        torch.cuda.synchronize()
    return Timeline.of(profile), engine.stats.rounds - rounds
