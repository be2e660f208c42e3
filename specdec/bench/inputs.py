"""What a benchmark needs before it can measure: the models and the prompts that its settings name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec.bench.mixed import ANSWER, ARRIVALS
from specdec.bench.settings import LENGTHS, Settings
from specdec.bench.shapes import config_of, random_model
from specdec.bench.stand import out_of_memory, reason
from specdec.bench.workload import SHIPPED, Workload, random_workload, tokenized
from specdec.checkpoint import find_checkpoint
from specdec.draft import check_vocabulary
from specdec.limits import max_positions
from specdec.loading import load_model, pick_device, pick_dtype
from specdec.prompt_file import Prompt, read_prompts

CPU_PROMPTS = 7
"""Of the prompts that ship, where no limit is given: one of each task, so that a CPU has done in minutes."""


@dataclass
class Inputs:
    """target, drafter: models (drafter None where none is measured or memory ran out, then drafter_error says so).

    arriving: the prompts that arrive under mixed load. warnings: what a reader of the figures should know about the prompts.
    """

    target: PreTrainedModel
    tokenizer: Any
    drafter: PreTrainedModel | None
    drafter_error: str | None
    workloads: list[Workload]
    arriving: list[list[int]]
    warnings: list[str]


def load_inputs(settings: Settings) -> Inputs:
    """Read the prompts, then load the models. Raises ValueError, one line, for what can't be read or doesn't fit."""
    asked = [] if settings.input_lens else _read(settings.prompts or SHIPPED)
    _check_drafter(settings)
    target, tokenizer = _load_target(settings)
    drafter, drafter_error = None, None
    if "draft" in settings.methods:
        try:
            drafter = _load_drafter(settings, target, tokenizer)
        except Exception as error:
            if not out_of_memory(error):
                raise
            drafter_error = reason(error)
    _check_output(settings.output_len, target)
    workloads = _random(settings, target) if settings.input_lens else _real(settings, asked, target, tokenizer)
    warnings = list(_warnings(settings, workloads, len(asked)))
    return Inputs(target, tokenizer, drafter, drafter_error, workloads, _arriving(settings, target), warnings)


def _read(file: Path) -> list[Prompt]:
    try:
        return read_prompts(file)
    except OSError as error:
        raise ValueError(f"prompts: {file}: {error.strerror}") from error


def _check_output(length: int, target: PreTrainedModel) -> None:
    """That it leaves a position for a prompt."""
    positions = max_positions(target)
    if positions and length >= positions:
        raise ValueError(f"output-len: expected at most {positions - 1}, the model's positions less one, got {length}")


def _warnings(settings: Settings, workloads: list[Workload], asked: int) -> Iterator[str]:
    """asked: prompts in the file."""
    if settings.input_lens and settings.acceptance_length is None and len(settings.methods) > 1:
        yield "random tokens flatter or slander speculation: their acceptance says nothing about real text"
    short = [k for k in settings.k if isinstance(k, int) and k + 1 < (settings.acceptance_length or 0)]
    if short:
        yield f"k = {', '.join(map(str, short))} cannot reach the forced length: there every draft is accepted"
    count, dropped = len(workloads[0].prompts), workloads[0].dropped
    if settings.limit is None and not settings.input_lens and count + dropped < asked:
        yield f"on a CPU the first {count} of {asked} prompts are asked; --limit {asked} asks all"
    if dropped:
        yield f"{dropped} prompts are too long for the model and were left out"
    if max(settings.batch) > count:
        yield (
            f"batch {max(settings.batch)} repeats the {count} prompts: copies share the KV of their prompt, so time to "
            f"first token and whole tok/s are too good"
        )


def _check_drafter(settings: Settings) -> None:
    """That there is one, before the target is loaded."""
    if settings.drafter is None:
        return
    try:
        config_of(settings.drafter) if settings.random_weights else find_checkpoint(settings.drafter)
    except ValueError as error:
        raise ValueError(f"drafter: {error}") from error


def _load_target(settings: Settings) -> tuple[PreTrainedModel, Any]:
    if settings.random_weights:
        where = pick_device(settings.device)
        return random_model(settings.target, pick_dtype(settings.dtype, where), where), None
    loaded = load_model(
        settings.target, dtype=settings.dtype, device=settings.device, trust_remote_code=settings.trust_remote_code
    )
    return loaded.model, loaded.tokenizer


def _load_drafter(settings: Settings, target: PreTrainedModel, tokenizer: Any) -> PreTrainedModel:
    assert settings.drafter is not None, "checked by Settings"
    if settings.random_weights:
        drafter, draft_tokenizer = random_model(settings.drafter, target.dtype, target.device, seed=1), None
    else:
        loaded = load_model(
            settings.drafter, dtype=target.dtype, device=target.device, trust_remote_code=settings.trust_remote_code
        )
        drafter, draft_tokenizer = loaded.model, loaded.tokenizer
    check_vocabulary(target, drafter, tokenizer, draft_tokenizer)
    return drafter


def _random(settings: Settings, target: PreTrainedModel) -> list[Workload]:
    _check_positions(LENGTHS, max(settings.input_lens), settings.output_len, target)
    vocab_size = target.config.get_text_config().vocab_size
    count, single = settings.limit or max(settings.batch), settings.limit is None
    workloads = [random_workload(n, count, vocab_size, settings.seed) for n in settings.input_lens]
    return [replace(workload, single=single) for workload in workloads]


def _arriving(settings: Settings, target: PreTrainedModel) -> list[list[int]]:
    if settings.mixed_len is None:
        return []
    _check_positions("mixed", settings.mixed_len, ANSWER, target)
    vocab_size = target.config.get_text_config().vocab_size
    return random_workload(settings.mixed_len, ARRIVALS, vocab_size, settings.seed + 1).prompts


def _check_positions(option: str, length: int, output: int, target: PreTrainedModel) -> None:
    positions = max_positions(target)
    if positions and length + output > positions:
        raise ValueError(
            f"{option}: expected at most {positions - output}, the model's positions less the output's, got {length}"
        )


def _real(settings: Settings, asked: list[Prompt], target: PreTrainedModel, tokenizer: Any) -> list[Workload]:
    if tokenizer is None:
        raise ValueError(f"{settings.target}: it came without a tokenizer; give --input-len for random tokens")
    positions = max_positions(target)
    name = settings.prompts.name if settings.prompts else "prompts that ship"
    workload = tokenized(name, asked, tokenizer, positions and positions - settings.output_len)
    short = target.device.type == "cpu" and settings.prompts is None
    count = settings.limit or (max(CPU_PROMPTS, *settings.batch) if short else len(workload.prompts))
    return [replace(workload, tasks=workload.tasks[:count], prompts=workload.prompts[:count])]
