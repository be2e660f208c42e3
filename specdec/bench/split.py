"""Where a round's time goes: draft, verify, sample, the rest of the round, the host, an idle device.

A pass of its own, so that the measured runs carry no clocks. On a CPU each part is timed as it is called. On a GPU the
rounds run step by step under the profiler, whose kernel times are set against the round time of the graphs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch

from specdec.bench.stand import Arm, Job, Stand, timed_step
from specdec.engine import Engine
from specdec.sequence import Sequence, Status

ROUNDS = 16
"""Rounds that are looked at; the shares settle within a few."""


@dataclass(frozen=True)
class Split:
    """Milliseconds of a round. other: packing, acceptance and bookkeeping; host: scheduler and detokenizer.

    On a GPU host is 0, its work runs beside the device's: what of it can't hide shows up as idle. On a CPU idle is 0.
    """

    draft_ms: float
    verify_ms: float
    sample_ms: float
    other_ms: float
    host_ms: float
    idle_ms: float


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


def split(stand: Stand, arm: Arm, job: Job, round_s: float) -> Split | None:
    """Run some rounds of the job and tell their parts apart; None if it ends before a round of decoding alone.

    round_s: seconds of a round as measured without clocks, for what a GPU idles.
    """
    engine, seqs = stand.engine(arm.method), stand.sequences(arm, job)
    cuda = stand.device.type == "cuda"
    graphs, step_by_step = engine.graphs, cast(Any, None)
    engine.graphs = step_by_step
    engine.pool.allocator.reset_prefix_cache()
    try:
        for seq in seqs:
            engine.submit(seq)
        while any(seq.status in (Status.WAITING, Status.EXTENDING) for seq in seqs):
            engine.step()
        with _Sections(engine, cuda) as sections:
            return _on_gpu(engine, seqs, round_s) if cuda else _on_cpu(engine, seqs, sections.seconds)
    finally:
        for seq in seqs:
            engine.cancel(seq)
        engine.run()
        engine.graphs = graphs


def _on_cpu(engine: Engine, seqs: list[Sequence], seconds: dict[str, float]) -> Split | None:
    total, steps = 0.0, 0
    while steps < ROUNDS and not engine.idle:
        total += timed_step(engine, seqs).seconds
        steps += 1
    if not steps:
        return None
    parts = seconds["propose"] + seconds["extend"] + seconds["accept"]
    each = (seconds["propose"], seconds["extend"], seconds["accept"], seconds["run"] - parts, total - seconds["run"], 0)
    return Split(*(1e3 * max(0.0, part) / steps for part in each))


def _on_gpu(engine: Engine, seqs: list[Sequence], round_s: float) -> Split | None:
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
    busy = device.get("specdec.run", 0.0)
    return Split(draft, verify, sample, max(0.0, busy - draft - verify - sample), 0.0, max(0.0, 1e3 * round_s - busy))
