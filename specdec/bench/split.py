"""Where a round's time goes: draft, verify, sample, the rest of the round, the host, an idle device.

A pass of its own, so that the measured runs carry no clocks; its parts are then scaled to the round that was measured.
On a CPU each part is timed as it is called. On a GPU the rounds run step by step under the profiler, whose kernel times
are set against the round time of the graphs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch

from specdec.bench.stand import Arm, Job, Stand
from specdec.bench.steps import StepClock
from specdec.engine import Engine
from specdec.sequence import Sequence, Status

ROUNDS = 16
"""Rounds that are looked at; the shares settle within a few."""


@dataclass(frozen=True)
class Split:
    """Milliseconds of a round; together they are the round as measured without clocks.

    other: packing, acceptance and bookkeeping; host: scheduler and detokenizer.

    On a GPU host is 0, its work runs beside the device's: what of it can't hide shows up as idle. On a CPU idle is 0.
    """

    draft_ms: float
    verify_ms: float
    sample_ms: float
    other_ms: float
    host_ms: float
    idle_ms: float

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
            with torch.profiler.record_function(f"specdec.{name}"):
                return call(*args, **kwargs)

        return marked if self._cuda else timed


def split(stand: Stand, arm: Arm, job: Job, round_ms: float) -> Split | None:
    """Run some rounds of the job and tell their parts apart; None if it ends before a round of decoding alone.

    round_ms: of a round as measured without clocks. Raises MethodFailed for whatever goes wrong.
    """
    engine, seqs = stand.engine(arm.method), stand.sequences(arm, job)
    cuda = stand.device.type == "cuda"
    engine.reset_prefix_cache()
    graphs, step_by_step = engine.graphs, cast(Any, None)
    engine.graphs = step_by_step
    try:
        for seq in seqs:
            engine.submit(seq)
        while any(seq.status in (Status.WAITING, Status.EXTENDING) for seq in seqs):
            engine.step()
        with _Sections(engine, cuda) as sections:
            found = _on_gpu(engine, round_ms) if cuda else _on_cpu(engine, seqs, sections.seconds, round_ms)
        for seq in seqs:
            engine.cancel(seq)
        engine.run()
    except Exception as error:
        raise stand.give_up(arm.method, error) from error
    finally:
        engine.graphs = graphs
    return found


def _on_cpu(engine: Engine, seqs: list[Sequence], seconds: dict[str, float], round_ms: float) -> Split | None:
    """The host is the device and never idle, so the shares are what was found, of the measured round."""
    total, steps = 0.0, 0
    clock = StepClock(engine, seqs)
    while steps < ROUNDS and not engine.idle:
        total += clock.step().seconds
        steps += 1
    if not steps:
        return None
    parts = seconds["propose"] + seconds["extend"] + seconds["accept"]
    each = (seconds["propose"], seconds["extend"], seconds["accept"], seconds["run"] - parts, total - seconds["run"])
    return Split.scaled([round_ms * part / total for part in each], round_ms)


def _on_gpu(engine: Engine, round_ms: float) -> Split | None:
    rounds = engine.stats.rounds
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as p:
        while engine.stats.rounds - rounds < ROUNDS and not engine.idle:
            engine.step()
        torch.cuda.synchronize()
    rounds = engine.stats.rounds - rounds
    if not rounds:
        return None
    device = {e.key: e.device_time_total / 1e3 / rounds for e in p.key_averages() if e.key.startswith("specdec.")}
    draft, verify, sample = (device.get(f"specdec.{name}", 0.0) for name in ("propose", "extend", "accept"))
    other = device.get("specdec.run", 0.0) - draft - verify - sample
    return Split.scaled([draft, verify, sample, other, 0.0], round_ms)
