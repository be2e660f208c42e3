"""The outside baseline: transformers' own `generate`, plain, with prompt look-up, and with an assistant model.

The model object is the same; outside of our forwards it runs its own attention and its own layers.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from specdec.bench.memory import peak_bytes, reset_peak, synchronize
from specdec.bench.stand import Job, MethodFailed, out_of_memory, reason
from specdec.bench.trace import Run, StepTime, Trace

METHODS = {"plain": "transformers", "lookup": "transformers-lookup", "draft": "transformers-assisted"}
LOOKUP_TOKENS = 10


class _Clock(StoppingCriteria):
    """Never stops anything; notes how many tokens there are after each step of `generate`, and when."""

    def __init__(self, prompt_len: int) -> None:
        self.prompt_len = prompt_len
        self.seen: list[tuple[float, int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        synchronize(input_ids.device)
        self.seen.append((time.perf_counter(), input_ids.shape[1] - self.prompt_len))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def run_transformers(model: PreTrainedModel, assistant: PreTrainedModel | None, method: str, job: Job) -> Run:
    """Decode the job through `generate`. method: one of METHODS' values; all but the plain one take one request.

    Raises MethodFailed for what it refuses, and when memory runs out.
    """
    if method != METHODS["plain"] and len(job.prompts) > 1:
        raise MethodFailed("transformers speculates for one request at a time only")
    device = model.get_input_embeddings().weight.device
    inputs, mask = _padded(job.prompts, device)
    clock = _Clock(inputs.shape[1])
    reset_peak(device)
    synchronize(device)
    started = time.perf_counter()
    try:
        arguments = _arguments(model, assistant, method, job)
        out = model.generate(inputs, attention_mask=mask, stopping_criteria=StoppingCriteriaList([clock]), **arguments)
    except Exception as error:
        if out_of_memory(error) and device.type == "cuda":
            torch.cuda.empty_cache()
        raise MethodFailed(reason(error)) from error
    synchronize(device)
    seconds = time.perf_counter() - started
    ends = _eos(model, job)
    tokens = [_cut(row[inputs.shape[1] :].tolist(), ends) for row in out]
    return _as_run(job, tokens, clock.seen, started, seconds, peak_bytes(device))


def _arguments(model: PreTrainedModel, assistant: PreTrainedModel | None, method: str, job: Job) -> dict[str, Any]:
    first = job.params[0]
    arguments: dict[str, Any] = {"max_new_tokens": first.max_tokens, "do_sample": bool(first.temperature)}
    if first.temperature:
        torch.manual_seed(first.seed or 0)
        arguments |= {"temperature": first.temperature, "top_k": 0, "top_p": 1.0}
    if first.ignore_eos:
        arguments |= {"min_new_tokens": first.max_tokens}
    if method == METHODS["lookup"]:
        arguments |= {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    if method == METHODS["draft"]:
        arguments |= {"assistant_model": assistant}
    pad = getattr(model.generation_config, "pad_token_id", None)
    eos = getattr(model.generation_config, "eos_token_id", None)
    fallback = eos[0] if isinstance(eos, list | tuple) and eos else eos
    return arguments | {"pad_token_id": next((i for i in (pad, fallback) if i is not None), 0)}


def _padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, longest] ids and attention mask, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def _eos(model: PreTrainedModel, job: Job) -> set[int]:
    eos = None if job.params[0].ignore_eos else getattr(model.generation_config, "eos_token_id", None)
    return set() if eos is None else set(eos) if isinstance(eos, list | tuple) else {eos}


def _cut(ids: list[int], ends: set[int]) -> list[int]:
    """Up to the first end token; what follows is padding."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]


def _as_run(
    job: Job, tokens: list[list[int]], seen: list[tuple[float, int]], started: float, seconds: float, peak: int
) -> Run:
    """Steps and arrivals from the clock: the first step holds the prompt, each later one is a round of decoding."""
    times = [started, *(t for t, _ in seen)]
    counts = [0, *(n for _, n in seen)]
    traces = [Trace(len(prompt), started, ids) for prompt, ids in zip(job.prompts, tokens, strict=True)]
    steps = []
    for i in range(1, len(times)):
        new = [min(len(ids), counts[i]) - min(len(ids), counts[i - 1]) for ids in tokens]
        for trace, n in zip(traces, new, strict=True):
            if n > 0:
                trace.arrivals.append((times[i], n))
        steps.append(StepTime(times[i] - times[i - 1], sum(n > 0 for n in new), sum(new), prompt=i == 1))
    return Run(traces, steps, seconds, peak)
