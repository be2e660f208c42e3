"""From the runs of a method at one point to its result."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.bench.document import Result, TaskResult
from specdec.bench.floor import Floor
from specdec.bench.losslessness import Losslessness
from specdec.bench.mixed import MixedLoad
from specdec.bench.split import Split
from specdec.bench.stand import Arm, Job, rounds_of
from specdec.bench.statistics import Acceptance, Distribution, Spread, rate, speedup
from specdec.bench.trace import Run, Trace
from specdec.bench.workload import Workload

Runs = list[list[Run]]
"""[runs][batches of prompts]"""


@dataclass(frozen=True)
class Point:
    """Where methods are compared: a workload in batches of one size, at one temperature. jobs: the batches."""

    workload: Workload
    batch: int
    temperature: float
    jobs: list[Job]
    latency_target_ms: float


@dataclass(frozen=True)
class Extras:
    """What is found beside the runs."""

    losslessness: Losslessness | None
    split: Split | None
    floor: Floor | None
    mixed: MixedLoad | None


def result(point: Point, arm: Arm, runs: Runs, base: Runs | None, extras: Extras) -> Result:
    """The result of `arm` at `point`. base: plain's runs, None for plain itself."""
    flat = [run for batches in runs for run in batches]
    traces = [trace for run in flat for trace in run.traces]
    drafts = rounds_of(flat)
    return Result(
        method=arm.method,
        k=arm.k,
        batch=point.batch,
        workload=point.workload.name,
        context=round(point.workload.median_len),
        temperature=point.temperature,
        requests=len(point.jobs) * point.batch,
        tokens=sum(run.emitted for run in runs[0]),
        decode_tok_s=Spread.of([rate([run.decode for run in batches]) for batches in runs]),
        whole_tok_s=Spread.of([rate([run.whole for run in batches]) for batches in runs]),
        decode_speedup=None if base is None else speedup(_decode(runs), _decode(base)),
        whole_speedup=None if base is None else speedup(_whole(runs), _whole(base)),
        ttft_ms=_ttft(traces),
        itl_token_ms=per_token(traces),
        itl_step_ms=per_step(traces),
        goodput_tok_s=goodput(flat, point.latency_target_ms),
        round_ms=round_ms(runs),
        split=extras.split,
        floor=extras.floor,
        peak_bytes=max(run.peak_bytes for run in flat),
        acceptance=Acceptance.of(drafts, sum(run.emitted for run in flat)) if drafts else None,
        losslessness=extras.losslessness,
        tasks=by_task(point, runs),
        preemptions=sum(trace.preemptions for trace in traces),
        captures=sum(run.captures for run in flat),
        mixed=extras.mixed,
    )


def _decode(runs: Runs) -> list[list[tuple[float, float]]]:
    return [[run.decode for run in batches] for batches in runs]


def _whole(runs: Runs) -> list[list[tuple[float, float]]]:
    return [[run.whole for run in batches] for batches in runs]


def _ttft(traces: Sequence[Trace]) -> Distribution:
    found = Distribution.of([1e3 * trace.ttft_s for trace in traces if trace.arrivals])
    assert found is not None, "a request that did not fail emits a token"
    return found


def per_token(traces: Sequence[Trace]) -> Distribution | None:
    """Milliseconds between tokens: the tokens of a round share the time since the round before equally."""
    gaps = [gap for trace in traces for gap in trace.gaps]
    return Distribution.of([1e3 * seconds / n for seconds, n in gaps], [n for _, n in gaps])


def per_step(traces: Sequence[Trace]) -> Distribution | None:
    """Milliseconds between rounds, however many tokens each brought: how long a reader sees nothing new."""
    return Distribution.of([1e3 * seconds for trace in traces for seconds, _ in trace.gaps])


def goodput(runs: Sequence[Run], target_ms: float) -> float:
    """Tokens per second, counting only requests whose mean time per token (after the first round) meets the target."""
    good = 0
    for run in runs:
        for trace in run.traces:
            mean = trace.seconds_per_token
            good += len(trace.token_ids) if mean is None or 1e3 * mean <= target_ms else 0
    seconds = sum(run.seconds for run in runs)
    return good / seconds if seconds else 0.0


def round_ms(runs: Runs) -> Spread | None:
    """Mean milliseconds of the rounds in which every row ran, run by run; None if there was none."""
    rounds = [[s for run in batches for s in run.full_rounds] for batches in runs]
    return Spread.of([1e3 * statistics.fmean(r) for r in rounds]) if all(rounds) else None


def by_task(point: Point, runs: Runs) -> list[TaskResult]:
    """One line for each task of the set, in its order."""
    traces: dict[str, list[Trace]] = {}
    for batches in runs:
        for job, run in zip(point.jobs, batches, strict=True):
            for i, trace in zip(job.numbers, run.traces, strict=True):
                traces.setdefault(point.workload.tasks[i], []).append(trace)
    return [TaskResult(task, len(of) // len(runs), *_of_task(of)) for task, of in traces.items()]


def _of_task(traces: list[Trace]) -> tuple[float, float]:
    """Acceptance length (0.0 where rounds are not known) and median tokens per second of a request."""
    rounds: Counter[tuple[int, int]] = Counter()
    for trace in traces:
        rounds.update(trace.rounds)
    tokens, total = sum(len(trace.token_ids) for trace in traces), sum(rounds.values())
    rates = [1 / mean for trace in traces if (mean := trace.seconds_per_token)]
    return tokens / total if total else 0.0, statistics.median(rates) if rates else 0.0
