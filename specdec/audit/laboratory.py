"""An audit from its settings: which subject, which levels, one report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.audit import distribution, equality, exact, sampler, toys
from specdec.audit.endpoint import EndpointSubject
from specdec.audit.report import Check, Report, check
from specdec.audit.subject import AssistedSubject, EngineSubject, Subject
from specdec.draft import LookupDrafter
from specdec.llm import LLM
from specdec.loading import load_model, pick_device
from specdec.prompt_file import read_prompts
from specdec.verify import VERIFIERS, block, rejection

LEVELS = (0, 1, 2, 3, 4)
TEXTS = (
    "The capital of France is",
    "def reverse(items):\n    ",
    "One, two, three, four, five, one, two, three,",
    "Dear Sir or Madam,\n\nI am writing to",
)


@dataclass(frozen=True)
class Settings:
    """model: None for the built-in ones. requests, tokens: of levels 2 and 3; level 4 decodes four times as many requests.

    transformers: audit its assisted generation instead of this package's engine. endpoint, baseline: URLs of servers with
    and without speculation, served: the model's name there. tolerance: the noise of a logit to allow for, None: measured.
    compile: run compiled layers; None: as `LLM` does for a model, and not for the built-in ones, where it would be most of
    the audit's time.
    """

    model: str | None = None
    drafter: str | None = None
    verifier: str = "coupled"
    k: int = 4
    levels: tuple[int, ...] = LEVELS
    requests: int = 4
    tokens: int = 24
    temperature: float = 1.0
    prompts: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    compile: bool | None = None
    trust_remote_code: bool = False
    transformers: bool = False
    endpoint: str | None = None
    baseline: str | None = None
    served: str | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.verifier not in VERIFIERS:
            raise ValueError(f"verifier: expected {', '.join(VERIFIERS)}, got {self.verifier!r}")
        unknown = [level for level in self.levels if level not in LEVELS]
        if unknown or not self.levels:
            raise ValueError(f"levels: expected some of 0 to 4, got {', '.join(map(str, self.levels)) or 'none'}")
        for name in ("k", "requests", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not self.temperature > 0:
            raise ValueError(f"temperature: expected more than 0 (level 2 is greedy by itself), got {self.temperature}")
        if (self.endpoint is None) != (self.baseline is None):
            raise ValueError("endpoint, baseline: expected both URLs, with speculation and without")
        if self.endpoint and (self.model or self.transformers):
            raise ValueError("endpoint: expected no MODEL and no --transformers beside it; give --served for its name")
        if self.transformers and not self.model:
            raise ValueError("transformers: expected a MODEL to generate with")


def audit(settings: Settings, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Run the levels. Raises ValueError for what can't be loaded, and RuntimeError if a request itself fails."""
    started = time.perf_counter()
    with ExitStack() as stack:
        subject = _subject(settings, stack)
        report = Report(subject.name)
        for level in sorted(set(settings.levels)):
            progress(f"level {level}")
            report.checks += _level(level, subject, settings)
    report.seconds = time.perf_counter() - started
    return report


def _level(level: int, subject: Subject, settings: Settings) -> list[Check]:
    ours = isinstance(subject, EngineSubject)
    if level == 0:
        return _exact() if ours else []
    if level == 1:
        return sampler.checks(pick_device(settings.device)) if ours else []
    if level == 2:
        found = equality.greedy(subject, settings.requests, settings.tokens, settings.tolerance)
        return [*found, subject.drafts()] if isinstance(subject, EngineSubject) else found
    if level == 3:
        return equality.seeds(subject, settings.requests, settings.tokens, settings.tolerance)
    found = distribution.outputs(subject, 4 * settings.requests, settings.tokens, settings.temperature)
    return [*found, *_tables(settings)] if ours else found


def _exact() -> list[Check]:
    found = []
    for name, method in (("rejection", rejection), ("block", block)):
        cases = exact.cases(method, name)
        worst = max(cases, key=lambda case: case.error())
        error = worst.error()
        text = f"total variation at most {error:.1e}" + ("" if error < exact.TOLERANCE else f", {worst.name}")
        title = f"{name}: {len(cases)} targets, drafters and policies summed exactly"
        found.append(check(0, title, error < exact.TOLERANCE, text, f"< {exact.TOLERANCE:g}"))
    return [*found, exact.coupled()]


def _tables(settings: Settings) -> list[Check]:
    device = pick_device(settings.device)
    return [distribution.tables(verifier, table, device) for verifier in VERIFIERS for table in distribution.TABLES]


def _subject(settings: Settings, stack: ExitStack) -> Subject:
    texts = _texts(settings)
    if settings.endpoint and settings.baseline:
        return EndpointSubject(settings.endpoint, settings.baseline, settings.served, texts)
    if settings.model is None:
        return _built_in(settings, stack)
    if settings.transformers:
        return _assisted(settings, settings.model, texts or list(TEXTS))
    drafter = settings.drafter or "lookup"
    proposer = (
        LookupDrafter(token_cost=0) if drafter == "lookup" else drafter
    )  # drafts are wanted, whether they pay or not
    llm = LLM(
        settings.model, drafter=proposer, verifier=settings.verifier, k=settings.k, dtype=settings.dtype,
        device=settings.device, compile="auto" if settings.compile is None else settings.compile,
        max_rows=min(4 * settings.requests, 64), trust_remote_code=settings.trust_remote_code,
    )  # fmt: skip
    stack.enter_context(llm)
    name = f"{settings.model} with {drafter}, {settings.verifier}, {str(llm.model.dtype).removeprefix('torch.')}"
    return EngineSubject(llm, _ids(llm.tokenizer, texts or list(TEXTS)), name, settings.verifier)


def _built_in(settings: Settings, stack: ExitStack) -> Subject:
    if settings.drafter is not None or settings.prompts is not None:
        raise ValueError("drafter, prompts: expected a MODEL to go with them; the built-in one has its own")
    target, drafter = (model.to(pick_device(settings.device)) for model in toys.random_pair())
    if settings.dtype != "auto":
        target, drafter = (model.to(getattr(torch, settings.dtype)) for model in (target, drafter))
    llm = LLM(
        target, drafter=drafter, verifier=settings.verifier, k=settings.k, compile=bool(settings.compile), max_rows=16,
        max_model_len=256,
    )  # fmt: skip
    stack.enter_context(llm)
    prompts = [[5], [7, 8, 9, 10], [1, 2, 3] * 5, [60, 61, 4, 60]]
    return EngineSubject(llm, prompts, f"the built-in model, {settings.verifier}", settings.verifier)


def _assisted(settings: Settings, model: str, texts: list[str]) -> Subject:
    options: dict[str, Any] = dict(
        dtype=settings.dtype, device=settings.device, trust_remote_code=settings.trust_remote_code
    )
    target = load_model(model, **options)
    helper = settings.drafter if settings.drafter not in (None, "lookup") else None
    assistant = load_model(helper, **options).model if helper else None
    name = f"transformers' generate of {model}, assisted by {helper or 'prompt look-up'}"
    return AssistedSubject(target.model.eval(), assistant, _ids(target.tokenizer, texts), name)


def _texts(settings: Settings) -> list[str] | None:
    if settings.prompts is None:
        return None
    return [prompt.text for prompt in read_prompts(settings.prompts)]


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    if tokenizer is None:
        raise ValueError("model: expected one with a tokenizer")
    return [tokenizer(text)["input_ids"] for text in texts]
