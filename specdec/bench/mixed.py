"""Mixed load: long prompts arrive while a batch runs. How long they wait, and how long they keep the others waiting.

The schedule is counted in tokens, not in seconds, so that it is the same for every method and machine: the prompts
arrive one after another, at even distances of what the batch emits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec import SamplingParams
from specdec.bench.stand import Arm, Job, Stand
from specdec.bench.statistics import Distribution
from specdec.bench.steps import StepClock
from specdec.bench.trace import StepTime, Trace

ARRIVALS, ANSWER = 4, 16
"""Prompts that arrive in a run, and the tokens that each asks for."""


@dataclass(frozen=True)
class MixedLoad:
    """prompt_len: of each of the prompts that arrived; arrivals: how many did in a run; prompt_budget: as it was set.

    largest_chunk: the most prompt tokens that were extended between two rounds. ttft_ms: of the prompts that arrived.
    itl_token_ms: of the batch among which they arrived, over the whole run. quiet_step_ms, busy_step_ms: between rounds
    of the batch, with no prompt extended in between, and with one. None where there was no such step.
    """

    prompt_len: int
    arrivals: int
    prompt_budget: int
    largest_chunk: int
    ttft_ms: Distribution
    itl_token_ms: Distribution
    quiet_step_ms: Distribution | None
    busy_step_ms: Distribution | None


@dataclass(frozen=True)
class MixedRun:
    """One run. gaps: of the batch's rows: (seconds since the round before, tokens, whether a prompt was extended)."""

    running: list[Trace]
    arrived: list[Trace]
    gaps: list[tuple[float, int, bool]]
    steps: list[StepTime]


def run_mixed(stand: Stand, arm: Arm, job: Job, prompts: list[list[int]]) -> MixedRun:
    """Decode the job to its full length while `prompts` arrive. Raises MethodFailed for whatever goes wrong."""
    seqs = stand.sequences(arm, replace(job, params=[replace(p, ignore_eos=True) for p in job.params]))
    late = stand.sequences(arm, _arriving(job.params[0], prompts))
    wanted = sum(seq.limit - seq.prompt_len for seq in seqs)
    with stand.measuring(arm.method, [*seqs, *late]) as engine:
        present = list(seqs)
        clock = StepClock(engine, present)
        running = [stand.submit(engine, seq) for seq in seqs]
        arrived, steps = list[Trace](), list[StepTime]()
        busy: list[list[bool]] = [[] for _ in seqs]  # of each round of each row
        while not engine.idle:
            steps.append(clock.step())
            for trace, flags in zip(running, busy, strict=True):
                flags += [steps[-1].behind] * (len(trace.arrivals) - len(flags))
            emitted = sum(len(seq) - seq.prompt_len for seq in seqs)
            if len(arrived) < len(late) and emitted * (len(late) + 1) >= wanted * (len(arrived) + 1):
                present.append(late[len(arrived)])
                arrived.append(stand.submit(engine, present[-1]))
    gaps = [(*g, f) for t, flags in zip(running, busy, strict=True) for g, f in zip(t.gaps, flags[1:], strict=True)]
    return MixedRun(running, arrived, gaps, steps)


def _arriving(like: SamplingParams, prompts: list[list[int]]) -> Job:
    params = replace(like, max_tokens=ANSWER, ignore_eos=True)
    return Job(list(range(len(prompts))), prompts, [params] * len(prompts))


def mixed_load(runs: Sequence[MixedRun], prompt_budget: int) -> MixedLoad:
    """The figures of all runs of a method together."""
    arrived = [trace for run in runs for trace in run.arrived]
    gaps = [gap for run in runs for gap in run.gaps]
    ttft = Distribution.of([1e3 * trace.ttft_s for trace in arrived])
    per_token = Distribution.of([1e3 * s / n for s, n, _ in gaps], [n for _, n, _ in gaps])
    assert ttft is not None and per_token is not None, "a run that did not fail has both"
    return MixedLoad(
        prompt_len=arrived[0].prompt_len,
        arrivals=len(runs[0].arrived),
        prompt_budget=prompt_budget,
        largest_chunk=max(step.prompt_tokens for run in runs for step in run.steps),
        ttft_ms=ttft,
        itl_token_ms=per_token,
        quiet_step_ms=Distribution.of([1e3 * s for s, _, busy in gaps if not busy]),
        busy_step_ms=Distribution.of([1e3 * s for s, _, busy in gaps if busy]),
    )
