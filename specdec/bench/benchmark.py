"""The benchmark: methods run in turn over the same prompts, in one process, and what it found as a document."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product

from specdec import LLM, SamplingParams
from specdec.bench.breakeven import Cost, best_depths, break_even
from specdec.bench.document import Document, Failure, Result, WorkloadInfo
from specdec.bench.environment import environment
from specdec.bench.floor import Floor, copy_bandwidth, floor, traffic
from specdec.bench.inputs import Inputs, load_inputs
from specdec.bench.losslessness import Losslessness, compare_tokens, logit_margin
from specdec.bench.mixed import ANSWER, MixedLoad, MixedRun, mixed_load, run_mixed
from specdec.bench.outside import METHODS as OUTSIDE
from specdec.bench.outside import run_transformers
from specdec.bench.settings import Settings
from specdec.bench.split import Split, split
from specdec.bench.stand import Arm, Job, MethodFailed, Stand, out_of_memory, rounds_of
from specdec.bench.summary import Extras, Point, Runs, result, round_ms
from specdec.bench.trace import Run
from specdec.bench.workload import Workload
from specdec.sampling import sample_seed
from specdec.scheduler import DRAFTER, TARGET

Progress = Callable[[str, float], None]
"""Told what is done now, and the share of all work that is done."""
Keep = Callable[[Document], None]
"""Given the document whenever a point has been measured, so that what ends the process leaves something."""
PLAIN = Arm("plain", 0)


class Benchmark:
    """One benchmark: `run` it, then take `document`, which holds what was measured so far at any time.

    Raises ValueError (one line) for models, prompts and sizes that don't fit together, when it is made.
    """

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] = (),
        progress: Progress = lambda text, share: None,
        keep: Keep = lambda document: None,
    ):
        self.settings, self.progress, self.keep = settings, progress, keep
        progress("loading", 0.0)
        self.inputs = load_inputs(settings)
        progress("measuring the copy bandwidth", 0.0)
        self.bandwidth = copy_bandwidth(self.inputs.target.device)  # before the pool takes the memory
        self.stand = Stand(_open(settings, self.inputs), settings.verifier, settings.acceptance_length)
        self.document = _empty_document(self, list(command))
        if self.inputs.drafter_error:
            self.document.failures.append(Failure("draft", "auto", 0, "all", 0.0, self.inputs.drafter_error))
        self._done, self._total = 0, 1

    def run(self) -> Document:
        """Measure everything. An interrupt ends it: what was measured until then is in the document, which says so."""
        s = self.settings
        points = [self._point(*p) for p in product(self.inputs.workloads, sorted(s.batch), s.temperatures)]
        self._total = sum(self._work(point) for point in points)
        try:
            for point in points:
                if not self.document.interrupted:
                    self._measure(point)
                    self._weigh()
                    self.keep(self.document)
        except KeyboardInterrupt:  # while a point was being summarised: those before it are in the document
            self.document.interrupted = True
            self._weigh()
        return self.document

    def close(self) -> None:
        """Give the KV memory back."""
        self.stand.close()

    # -- what is compared

    def arms(self, batch: int) -> list[Arm]:
        """Methods and depths at a batch size, plain first. transformers speculates for one request at a time only."""
        s = self.settings
        methods = [m for m in s.methods if m != "plain" and not (m == "draft" and self.inputs.drafter is None)]
        ours = [Arm(m, k) for m in methods for k in s.k]
        outside = [Arm(OUTSIDE[m], "") for m in ["plain", *(methods if batch == 1 else [])]] if s.against else []
        return [PLAIN, *ours, *outside]

    def _point(self, workload: Workload, batch: int, temperature: float) -> Point:
        jobs = [self._job(workload, numbers, temperature) for numbers in workload.batches(batch)]
        return Point(workload, batch, temperature, jobs, self.settings.latency_target_ms)

    def _job(self, workload: Workload, numbers: list[int], temperature: float) -> Job:
        s = self.settings
        common = SamplingParams(
            max_tokens=s.output_len, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0,
            ignore_eos=s.ignore_eos or workload.random,
        )  # fmt: skip
        params = [replace(common, seed=sample_seed(s.seed, i)) for i in numbers]
        return Job(numbers, [workload.prompts[i] for i in numbers], params)

    # -- running

    def _work(self, point: Point) -> int:
        arms, runs = self.arms(point.batch), self.settings.runs
        mixed = sum(arm.method not in OUTSIDE.values() for arm in arms) * (runs + 1) if self.inputs.arriving else 0
        return sum(len(self._warm_jobs(point, arm)) + runs * len(point.jobs) for arm in arms) + mixed

    def _warm_jobs(self, point: Point, arm: Arm) -> list[Job]:
        """A GPU is warm once every batch ran in full: a draining one needs graphs of its own. transformers has none."""
        graphs = self.stand.device.type == "cuda" and arm.method not in OUTSIDE.values()
        return point.jobs if graphs else point.jobs[:1]

    def _measure(self, point: Point) -> None:
        measured: dict[Arm, Runs] = {arm: [] for arm in self.arms(point.batch)}
        splits: dict[Arm, Split | None] = {}
        mixed: dict[Arm, list[MixedRun]] = {}
        try:
            for arm in list(measured):
                self._attempt(point, arm, self._warm_jobs(point, arm), "warm-up", measured)
            for number in range(self.settings.runs):
                self._one_run(point, number, measured)
            for arm, runs in measured.items():
                splits[arm] = self._split(point, arm, runs)
            self._mixed_runs(point, list(measured), mixed)
        except KeyboardInterrupt:
            self.document.interrupted = True
        loads = {arm: mixed_load(runs, self.settings.prompt_budget) for arm, runs in mixed.items() if runs}
        self._summarise(point, measured, splits, loads)

    def _one_run(self, point: Point, number: int, measured: dict[Arm, Runs]) -> None:
        """Every method over every batch, in turn within each batch, forwards and backwards.

        A run counts once it is whole; the first one as far as it came, so that an interrupt leaves something.
        """
        runs: dict[Arm, list[Run]] = {arm: [] for arm in measured}
        try:
            for job in point.jobs:
                for arm in list(measured) if number % 2 == 0 else list(measured)[::-1]:
                    what = f"run {number + 1} of {self.settings.runs}"
                    runs[arm] += self._attempt(point, arm, [job], what, measured)
        finally:
            shortest = min((len(runs[arm]) for arm in measured), default=0)
            if shortest == len(point.jobs) or (shortest and number == 0):
                for arm in measured:
                    measured[arm].append(runs[arm][:shortest])

    def _attempt(self, point: Point, arm: Arm, jobs: list[Job], what: str, measured: dict[Arm, Runs]) -> list[Run]:
        """The jobs' runs; if the method fails it is reported, taken out of `measured`, and there are none."""
        try:
            runs = []
            for job in jobs:
                where = f"batch {point.batch}, {point.workload.name}, T={point.temperature:g}"
                self.progress(f"{arm.name}, {where}: {what}", min(1.0, self._done / self._total))
                runs.append(self._run(arm, job))
                self._done += 1
            return runs
        except MethodFailed as error:
            del measured[arm]
            self._fail(point, arm, str(error))
            return []

    def _fail(self, point: Point, arm: Arm, why: str) -> None:
        where = point.batch, point.workload.name, point.temperature
        self.document.failures.append(Failure(arm.method, arm.k, *where, why))

    def _mixed_runs(self, point: Point, arms: list[Arm], done: dict[Arm, list[MixedRun]]) -> None:
        """Our own methods under mixed load, in turn, after a warm-up of each; fills `done`."""
        done |= {arm: [] for arm in arms if arm.method not in OUTSIDE.values() and self.inputs.arriving}
        for number in range(self.settings.runs + 1):
            for arm in list(done) if number % 2 == 0 else list(done)[::-1]:
                what = f"run {number} of {self.settings.runs}" if number else "warm-up"
                self.progress(f"{arm.name}, batch {point.batch}, mixed load: {what}", self._done / self._total)
                try:
                    run = run_mixed(self.stand, arm, point.jobs[0], self.inputs.arriving)
                except MethodFailed as error:
                    del done[arm]
                    self._fail(point, arm, f"mixed load: {error}")
                    continue
                done[arm] += [run] if number else []
                self._done += 1

    def _run(self, arm: Arm, job: Job) -> Run:
        if arm.method in OUTSIDE.values():
            return run_transformers(self.inputs.target, self.inputs.drafter, arm.method, job)
        return self.stand.run(arm, job)

    # -- what comes out

    def _summarise(
        self,
        point: Point,
        measured: dict[Arm, Runs],
        splits: dict[Arm, Split | None],
        loads: dict[Arm, MixedLoad],
    ) -> None:
        base = measured.get(PLAIN)
        for arm, runs in measured.items():
            if not runs:
                continue
            cut = replace(point, jobs=point.jobs[: len(runs[0])])
            extras = Extras(
                losslessness=None if arm == PLAIN or base is None else self._losslessness(cut, arm, runs, base),
                split=splits.get(arm),
                floor=self._floor(cut, arm, runs),
                mixed=loads.get(arm),
            )
            found = result(cut, arm, runs, None if arm == PLAIN else base, extras)
            self.document.results.append(found)
            self._warn(found)

    def _warn(self, found: Result) -> None:
        """Of what makes a result something else than decoding at full speed."""
        where = f"{found.arm} at batch {found.batch}, {found.workload}"
        if found.captures:
            self.document.warnings.append(f"{where}: {found.captures} graphs were captured in its measured runs")
        if found.preemptions:
            self.document.warnings.append(
                f"{where}: the KV pool was too small, rows gave way {found.preemptions} times"
            )

    def _losslessness(self, point: Point, arm: Arm, runs: Runs, base: Runs) -> Losslessness | None:
        """None where tokens cannot agree: forced acceptance, or sampling with random numbers that are not plain's."""
        own_noise = arm.method in OUTSIDE.values() or self.settings.verifier != "coupled"
        if self.settings.acceptance_length is not None or (own_noise and point.temperature):
            return None
        plain, other = ([t.token_ids for run in side[0] for t in run.traces] for side in (base, runs))
        prompts = [prompt for job in point.jobs for prompt in job.prompts]

        def margin(request: int, token: int, plain_id: int, other_id: int) -> float | None:
            prefix = prompts[request] + plain[request][:token]
            try:
                return logit_margin(self.inputs.target, prefix, plain_id, other_id)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                return None  # a long prefix beside a pool that took the memory; the difference itself is told

        return compare_tokens(plain, other, margin, "plain")

    def _split(self, point: Point, arm: Arm, runs: Runs) -> Split | None:
        """Of our own methods; None where there was no round of decoding alone, or the pass failed."""
        measured = round_ms(runs)
        if arm.method in OUTSIDE.values() or measured is None:
            return None
        self.progress(f"{arm.name}, batch {point.batch}: where a round's time goes", self._done / self._total)
        try:
            return split(self.stand, arm, point.jobs[0], measured.median)
        except MethodFailed as error:
            self.document.warnings.append(f"{arm.name} at batch {point.batch}: its rounds were not split: {error}")
            return None

    def _floor(self, point: Point, arm: Arm, runs: Runs) -> Floor | None:
        measured = round_ms(runs)
        if arm.method in OUTSIDE.values() or measured is None:
            return None
        traces = [trace for batch in runs[0] for trace in batch.traces]
        mean_context = sum(t.prompt_len + len(t.token_ids) / 2 for t in traces) / len(traces)
        pool, drafts = self.stand.llm.engine.pool, arm.method == "draft"
        target = traffic(self.inputs.target, pool, TARGET)
        drafter = traffic(self.inputs.drafter, pool, DRAFTER) if drafts and self.inputs.drafter else None
        found = rounds_of([run for batches in runs for run in batches])
        drafted = sum(d * n for (d, _), n in found.items()) / max(1, found.total())
        depth = drafted if arm.k == "auto" else int(arm.k)  # how deep an adaptive drafter went, on average
        context = point.batch * mean_context
        return floor(target, drafter, depth, context, measured.median / 1e3, self.bandwidth)

    def _weigh(self) -> None:
        """What break-even needs, from all that was measured so far."""
        costs = self._costs()
        self.document.break_even = [break_even(cost) for cost in costs]
        self.document.best_depths = best_depths(costs)

    def _costs(self) -> list[Cost]:
        """Round times beside plain's at the same load, one temperature: it hardly changes them."""
        first = [r for r in self.document.results if r.temperature == self.settings.temperatures[0]]
        plain = {(r.workload, r.batch): r.round_ms for r in first if r.method == "plain"}
        costs = []
        for r in first:
            base = plain.get((r.workload, r.batch))
            if r.method in ("lookup", "draft") and r.round_ms and base and r.acceptance:
                drafted = r.acceptance.drafted / r.acceptance.rounds
                costs.append(Cost(r.method, r.batch, r.context, r.k, drafted, r.round_ms.median, base.median))
        return costs


def _open(settings: Settings, inputs: Inputs) -> LLM:
    arriving = max(map(len, inputs.arriving), default=0)
    return LLM(
        inputs.target,
        tokenizer=inputs.tokenizer,
        drafter=inputs.drafter,
        verifier=settings.verifier,
        max_model_len=max(max(w.longest for w in inputs.workloads) + settings.output_len, arriving + ANSWER),
        max_rows=max(settings.batch) + len(inputs.arriving),
        prompt_budget=settings.prompt_budget,
        graphs=settings.graphs,
        compile=settings.compile,
        kv_dtype=settings.kv_dtype,
        kv_scales=settings.kv_scales,
    )


def _dtype(llm: LLM) -> str:
    dtype = str(llm.model.dtype).removeprefix("torch.")
    return dtype if llm.kv_scales is None else f"{dtype}, fp8 KV"


def _empty_document(bench: Benchmark, command: list[str]) -> Document:
    settings, engine = bench.settings, bench.stand.llm.engine
    graphs, compiled = engine.graphs is not None, engine.target.layers is not None
    return Document(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        target=settings.target,
        drafter=settings.drafter,
        settings=json.loads(json.dumps(asdict(settings), default=str)),
        environment=environment(bench.stand.device, _dtype(bench.stand.llm), graphs, compiled, bench.bandwidth),
        controlled=settings.acceptance_length,
        weights="random" if settings.random_weights else "trained",
        latency_target_ms=settings.latency_target_ms,
        workloads=[_info(workload) for workload in bench.inputs.workloads],
        results=list[Result](),
        failures=list[Failure](),
        break_even=[],
        best_depths=[],
        warnings=list(bench.inputs.warnings),
    )


def _info(workload: Workload) -> WorkloadInfo:
    tasks = dict(Counter(workload.tasks))
    return WorkloadInfo(
        workload.name, workload.sha256, len(workload.prompts), workload.median_len, workload.random, tasks
    )
