"""The test stand: models loaded once, an engine for each method over the same target, pool and rows, one run at a time.

It drives the engines in its own thread, so that a token's time is when the host reads its round; the detokenizer runs
as it does for people.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdec import LLM, SamplingParams
from specdec.bench.controlled import Filled, ForcedLength
from specdec.bench.memory import peak_bytes, reset_peak, synchronize
from specdec.bench.steps import StepClock
from specdec.bench.trace import Run, StepTime, Trace
from specdec.detokenizer import Detokenizer
from specdec.draft import LookupDrafter
from specdec.engine import Engine
from specdec.options import AUTO_K
from specdec.sequence import Sequence
from specdec.verify import VERIFIERS


class MethodFailed(RuntimeError):
    """A method can't be measured, for the reason that the message gives."""


@dataclass(frozen=True)
class Arm:
    """What is compared: a method at a number of drafts. k: "auto" is what pays; 0 for plain."""

    method: str
    k: int | str

    @property
    def name(self) -> str:
        return self.method if self.k in (0, "") else f"{self.method} k={self.k}"


@dataclass(frozen=True)
class Job:
    """A batch to decode: the prompts' numbers in their workload, their token ids, and parameters for each."""

    numbers: list[int]
    prompts: list[list[int]]
    params: list[SamplingParams]


@dataclass(slots=True)
class Stopwatch:
    """Listens to one sequence and notes when its tokens come; turns them into text as an LLM does."""

    trace: Trace
    text: Detokenizer | None
    _drafted: int = 0
    _accepted: int = 0
    _rounds: int = 0

    def emitted(self, seq: Sequence, token_ids: list[int]) -> tuple[int, bool]:
        """See `specdec.listener.Listener`. The engine counts a round after it told us, so the one before is settled."""
        self._settle(seq)
        self.trace.arrivals.append((time.perf_counter(), len(token_ids)))
        return len(token_ids), False

    def finished(self, seq: Sequence) -> None:
        self._settle(seq)
        self.trace.token_ids = seq.output_ids
        if self.text:
            self.text.decode(seq.output_ids)
        self.trace.cached_tokens, self.trace.preemptions = seq.stats.cached_tokens, seq.stats.preemptions

    def _settle(self, seq: Sequence) -> None:
        stats = seq.stats
        if stats.rounds > self._rounds:
            self.trace.rounds[stats.drafted - self._drafted, stats.accepted - self._accepted] += 1
            self._rounds, self._drafted, self._accepted = stats.rounds, stats.drafted, stats.accepted


class Stand:
    """Engines over the models of `llm`, which is opened with the drafter model if `draft` is to be measured.

    verifier: by its name, that of `llm`. acceptance_length: None, or what to force ("controlled acceptance").
    """

    def __init__(self, llm: LLM, verifier: str = "coupled", acceptance_length: float | None = None):
        self.llm, self.verifier, self.acceptance_length = llm, verifier, acceptance_length
        self.device = llm.engine.rows.device
        self._engines: dict[str, Engine] = {}

    def engine(self, method: str) -> Engine:
        """The engine of a method, made at its first use. Raises MethodFailed if its drafter isn't there."""
        if method not in self._engines:
            self._engines[method] = self._make(method)
        return self._engines[method]

    def _make(self, method: str) -> Engine:
        base = self.llm.engine
        drafter = self._drafter(method)
        kind = {"lookup": "lookup", "draft": "model"}.get(method, "none")
        config = replace(base.config, k=AUTO_K.get(kind, 0))
        engine = Engine(base.target, self._verifier(), base.rows, drafter, config)
        engine.prompts = base.prompts  # the target's forwards, of which each method would capture the same graphs
        return engine

    def _drafter(self, method: str) -> Any:
        if method == "plain":
            return None
        if method == "lookup":
            return Filled(LookupDrafter()) if self.acceptance_length else LookupDrafter()
        if self.llm.engine.drafter is None:
            raise MethodFailed("no draft model")
        return self.llm.engine.drafter

    def _verifier(self) -> Any:
        vocab_size = self.llm.vocab_size
        if self.acceptance_length is None:
            return VERIFIERS[self.verifier](vocab_size)
        return ForcedLength(vocab_size, self.acceptance_length)

    def sequences(self, arm: Arm, job: Job) -> list[Sequence]:
        """The job's requests as sequences of the arm's depth; stop tokens as the model has them."""
        k = None if arm.k == "auto" else int(arm.k)
        stops = () if self.llm.model.generation_config is None else self.llm.model.generation_config.eos_token_id
        eos = () if stops is None else (stops,) if isinstance(stops, int) else tuple(stops)
        seqs = []
        for prompt, params in zip(job.prompts, job.params, strict=True):
            resolved = replace(params, k=k).resolve(self.llm.model.generation_config)
            limit = min(len(prompt) + params.max_tokens, self.llm.limits.max_model_len)
            seqs.append(Sequence(prompt, resolved, limit=limit, eos=eos))
        return seqs

    def run(self, arm: Arm, job: Job) -> Run:
        """Decode the job once from an empty prefix cache. Raises MethodFailed for whatever goes wrong in it."""
        seqs = self.sequences(arm, job)
        reset_peak(self.device)
        with self.measuring(arm.method, seqs) as engine:
            captures = engine.graphs.captures if engine.graphs else 0
            started, clock = time.perf_counter(), StepClock(engine, seqs)
            traces = [self.submit(engine, seq) for seq in seqs]
            steps = list[StepTime]()
            while not engine.idle:
                steps.append(clock.step())
            seconds = time.perf_counter() - started
        captures = engine.graphs.captures - captures if engine.graphs else 0
        return Run(traces, steps, seconds, peak_bytes(self.device), captures)

    @contextmanager
    def measuring(self, method: str, seqs: list[Sequence]) -> Iterator[Engine]:
        """The engine of a method with nothing cached; what goes wrong within, or with one of `seqs`, is MethodFailed."""
        engine = self.engine(method)
        engine.reset_prefix_cache()
        synchronize(self.device)
        try:
            yield engine
        except Exception as error:
            raise self.give_up(method, error) from error
        broken = engine.drafter_error or next((seq.error for seq in seqs if seq.error), None)
        if broken is not None:
            raise self.give_up(method, broken) from broken

    def submit(self, engine: Engine, seq: Sequence) -> Trace:
        """Ask for `seq` now; its trace fills while the engine steps."""
        trace, tokenizer = Trace(seq.prompt_len, time.perf_counter()), self.llm.tokenizer
        engine.submit(seq, Stopwatch(trace, Detokenizer(tokenizer) if tokenizer is not None else None))
        return trace

    def give_up(self, method: str, error: BaseException) -> MethodFailed:
        """What to report of a method that failed; its engine is given up, its rows and blocks are freed."""
        engine = self._engines.pop(method)
        for seq in [*engine.scheduler.sequences, *engine.scheduler.waiting]:
            engine.cancel(seq)
        engine.flights.clear()
        engine.step()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return MethodFailed(reason(error))

    def close(self) -> None:
        self._engines.clear()
        self.llm.close()


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory ran out: torch's own error on a GPU, the allocator's RuntimeError on a CPU."""
    words = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in words or (
        "can't allocate memory" in words
    )  # fmt: skip


def reason(error: BaseException) -> str:
    """One line."""
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return f"out of memory: {text}" if out_of_memory(error) else text


def rounds_of(runs: list[Run]) -> Counter[tuple[int, int]]:
    """(drafts verified, accepted) over all requests of the runs."""
    total: Counter[tuple[int, int]] = Counter()
    for run in runs:
        for trace in run.traces:
            total.update(trace.rounds)
    return total
