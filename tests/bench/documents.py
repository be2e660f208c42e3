"""Documents made by hand, with round figures, for tables, charts, pages and comparisons; settings for quick benchmarks."""

from __future__ import annotations

import dataclasses
from collections import Counter

from specdec.bench.breakeven import Cost, best_depths, break_even
from specdec.bench.document import Document, Failure, Result, TaskResult, WorkloadInfo
from specdec.bench.environment import Environment
from specdec.bench.floor import Floor
from specdec.bench.losslessness import Difference, Losslessness
from specdec.bench.mixed import MixedLoad
from specdec.bench.settings import Settings
from specdec.bench.split import Split
from specdec.bench.statistics import Acceptance, Distribution, Interval, Spread

BASE = Settings(
    "tiny",
    methods=("plain",),
    random_weights=True,
    input_lens=(13,),
    output_len=6,
    runs=2,
    dtype="float32",
    device="cpu",
)


def result(method: str, k: int | str = 0, batch: int = 1, speed: float = 1.0, **changes) -> Result:
    """A method that decodes at `speed` times 100 tokens per second."""
    gaps = Distribution.of([8.0, 10.0, 30.0], [5, 4, 1])
    rounds = Counter({(0, 0): 100} if method == "plain" else {(4, 1): 60, (4, 4): 40})
    fields = dict(
        method=method, k=k, batch=batch, workload="prompts that ship", context=60, temperature=0.0, requests=2, tokens=40,
        decode_tok_s=Spread.of([100 * speed, 99 * speed, 102 * speed]),
        whole_tok_s=Spread.of([80 * speed, 81 * speed, 79 * speed]),
        decode_speedup=None if method == "plain" else Interval(speed, 0.9 * speed, 1.1 * speed, "prompts"),
        whole_speedup=None if method == "plain" else Interval(speed, 0.95 * speed, 1.05 * speed, "prompts"),
        ttft_ms=Distribution.of([12.0, 15.0]), itl_token_ms=gaps, itl_step_ms=gaps, goodput_tok_s=70.0,
        round_ms=Spread.of([10.0, 10.1]), split=Split(1, 6, 1, 1, 0.5, 0.5), floor=Floor(10_000_000, 4.0, 40.0),
        peak_bytes=123_000_000, acceptance=Acceptance.of(rounds, 100 if method == "plain" else 320),
        losslessness=None if method == "plain" else Losslessness("plain", 2, 2, []),
        tasks=[TaskResult("chat", 1, 1.5, 90 * speed), TaskResult("<code>", 1, 3.0, 110 * speed)], preemptions=0, captures=0,
        mixed=MixedLoad(4096, 4, 512, 512, Distribution.of([90.0, 200.0]), gaps, gaps, Distribution.of([35.0, 41.0])),
    )  # fmt: skip
    return Result(**(fields | changes))


def document(**changes) -> Document:
    """Plain, look-up and a draft model at two batch sizes; one output differs, one method was skipped."""
    differs = Losslessness("plain", 2, 1, [Difference(1, 7, 5, 6, 0.0123)])
    results = [
        result("plain"),
        result("lookup", "auto", speed=1.5),
        result("draft", 4, speed=1.2, losslessness=differs),
        result("plain", batch=8, speed=5),
        result("draft", 4, batch=8, speed=4.5),
    ]
    costs = [Cost("draft", b, 60, k, float(k), 10.0 + 2.5 * k * b, 10.0) for b in (1, 8) for k in (2, 4)]
    costs.append(Cost("lookup", 1, 60, "auto", 0.6, 10.6, 10.0))
    fields = dict(
        created="2026-01-02T03:04:05+00:00", command=["bench", "model <x>"], target="model <x>", drafter="small & fast",
        settings={"output_len": 20}, environment=environment(), controlled=None, weights="trained", latency_target_ms=50.0,
        workloads=[WorkloadInfo("prompts that ship", "ab" * 32, 2, 60.0, False, {"chat": 1, "<code>": 1})],
        results=results, failures=[Failure("lookup", "auto", 8, "prompts that ship", 0.0, "out of memory: <all> of it")],
        break_even=[break_even(cost) for cost in costs], best_depths=best_depths(costs), warnings=["mind the <gap>"],
    )  # fmt: skip
    return Document(**(fields | changes))


def environment(**changes) -> Environment:
    known = Environment(
        "A device", "float32", False, False, 2, 2, "Linux", "3.11.9", {"torch": "2.13.0"}, {}, 12.5
    )  # fmt: skip
    return dataclasses.replace(known, **changes)
