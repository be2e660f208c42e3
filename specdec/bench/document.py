"""The JSON document of a benchmark: its dataclasses are its schema, read and written by their fields.

docs/benchmarking.md explains each field. A change that an old reader would misread raises the number in SCHEMA.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from specdec.bench.breakeven import BestDepth, BreakEven
from specdec.bench.environment import Environment
from specdec.bench.floor import Floor
from specdec.bench.losslessness import Losslessness
from specdec.bench.mixed import MixedLoad
from specdec.bench.split import Split
from specdec.bench.statistics import Acceptance, Distribution, Interval, Spread

SCHEMA = "specdec.bench/1"
MOST_TASKS = 16
"""Shown side by side: a file may name a task of its own for every prompt."""


@dataclass(frozen=True)
class WorkloadInfo:
    """The prompts of a point. sha256: of their token ids. input_len: median tokens; tasks: prompts of each."""

    name: str
    sha256: str
    prompts: int
    input_len: float
    random: bool
    tasks: dict[str, int]


@dataclass(frozen=True)
class TaskResult:
    """One task of the prompt set. request_tok_s: median over its requests of tokens per second after the first round."""

    task: str
    requests: int
    acceptance_length: float
    request_tok_s: float


@dataclass(frozen=True)
class Result:
    """One method at one point: batch, workload, temperature. Rates are tokens per second of the whole batch."""

    method: str
    k: int | str
    batch: int
    workload: str
    context: int
    temperature: float
    requests: int
    tokens: int
    decode_tok_s: Spread
    whole_tok_s: Spread
    decode_speedup: Interval | None
    whole_speedup: Interval | None
    ttft_ms: Distribution
    itl_token_ms: Distribution | None
    itl_step_ms: Distribution | None
    goodput_tok_s: float
    round_ms: Spread | None
    split: Split | None
    floor: Floor | None
    peak_bytes: int
    acceptance: Acceptance | None
    losslessness: Losslessness | None
    tasks: list[TaskResult]
    preemptions: int
    captures: int
    mixed: MixedLoad | None

    @property
    def arm(self) -> str:
        """The method and its depth, as tables name it."""
        return self.method if self.k in (0, "") else f"{self.method} k={self.k}"

    @property
    def point(self) -> tuple[str, int, float]:
        return self.workload, self.batch, self.temperature

    def task_speedups(self, plain: Result) -> dict[str, float]:
        """Of the most asked tasks, MOST_TASKS at most, the speed of a request over that of `plain`, a result at the same
        point; 0.0 where it has none.
        """
        often = sorted(plain.tasks, key=lambda t: -t.requests)[:MOST_TASKS]
        base = {t.task: t.request_tok_s for t in often}
        return {t.task: t.request_tok_s / base[t.task] if base[t.task] else 0.0 for t in self.tasks if t.task in base}


@dataclass(frozen=True)
class Failure:
    """A method that was skipped, where, and why."""

    method: str
    k: int | str
    batch: int
    workload: str
    temperature: float
    reason: str


@dataclass
class Document:
    """A whole benchmark. controlled: the forced acceptance length, None where acceptance is measured."""

    created: str
    command: list[str]
    target: str
    drafter: str | None
    settings: dict[str, Any]
    environment: Environment
    controlled: float | None
    weights: str
    latency_target_ms: float
    workloads: list[WorkloadInfo]
    results: list[Result]
    failures: list[Failure]
    break_even: list[BreakEven]
    best_depths: list[BestDepth]
    warnings: list[str]
    interrupted: bool = False
    schema: str = SCHEMA

    @property
    def label(self) -> str | None:
        """What every figure has to be labelled with."""
        return None if self.controlled is None else f"controlled acceptance {self.controlled:g}"

    @property
    def verifier(self) -> str:
        return self.settings.get("verifier", "coupled")  # the only one, before there was a choice

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def read_document(path: Path) -> Document:
    """A document that `to_json` wrote. Raises ValueError naming the file and the field, OSError if it can't be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested thousands deep
        raise ValueError(f"{path}: expected JSON, {error}") from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: schema: expected {SCHEMA!r}, a document of specdec bench, got {schema!r}")
    try:
        return _read(Document, value, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` of JSON as the type `kind`: dataclasses, lists, dicts by name, unions and plain values."""
    if is_dataclass(kind):
        return _read_fields(kind, value, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(inner, value, where)
    if origin is list:
        _expect(isinstance(value, list), "a list", value, where)
        return [_read(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, dict), "an object", value, where)
        return {key: _read(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float:
        _expect(isinstance(value, int | float) and not isinstance(value, bool), "a number", value, where)
        return float(value)
    if kind is not Any:
        _expect(type(value) is kind, {int: "an integer", str: "a string", bool: "true or false"}[kind], value, where)
    return value


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), "an object", value, where)
    types_of = typing.get_type_hints(kind)
    known = {field.name for field in fields(kind)}
    for name in value:
        if name not in known:
            raise ValueError(f"{_join(where, name)}: no such field")
    for field in fields(kind):
        if field.name not in value and is_required(field):
            raise ValueError(f"{_join(where, field.name)}: expected a value, got none")
    return kind(**{name: _read(types_of[name], item, _join(where, name)) for name, item in value.items()})


def is_required(field: Field[Any]) -> bool:
    """Whether a document must have it: fields that came later have defaults."""
    return field.default is MISSING and field.default_factory is MISSING


def _read_union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    choices = tuple(choice for choice in choices if choice is not type(None))
    if len(choices) == 1:
        return _read(choices[0], value, where)
    _expect(type(value) in choices, " or ".join(choice.__name__ for choice in choices), value, where)
    return value


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _expect(holds: bool, what: str, value: Any, where: str) -> None:
    if not holds:
        raise ValueError(f"{where}: expected {what}, got {json.dumps(value)[:40]}")
