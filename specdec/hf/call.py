"""One call of `generate`, as transformers hands it to its decoding loop: what it asks for, and what has no paged form."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from specdec.hf.parameters import Parameters, translated
from specdec.limits import max_positions
from specdec.model import device_of
from specdec.sampling import SamplingParams
from specdec.sequence import Sequence

_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""What the sampling kernel does itself, in its order, which is also the order in which transformers builds them."""

_CACHES = ("cache", "past_key_values")
_UNDERSTOOD = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *_CACHES}
_KEPT = ("output_attentions", "output_hidden_states")
_OTHER_ASSISTANTS = ("assistant_early_exit", "use_mtp", "speculation_type", "assistant_ensemble_weight")
_STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}


@dataclass
class Call:
    """input_ids [B, L] int64, left-padded, one row per sample. kwargs: what is meant for the model's forward."""

    model: PreTrainedModel
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: Any = None
    synced_gpus: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    # -- what it asks for

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The tokens of each row, without its padding."""
        rows = self.input_ids.tolist()
        return [row[n:] for row, n in zip(rows, self.padding, strict=True)]

    @cached_property
    def padding(self) -> list[int]:
        """Masked tokens at the left of each row."""
        mask = self.kwargs.get("attention_mask")
        if mask is None:
            return [0] * len(self.input_ids)
        return (mask == 0).sum(1).tolist()

    @cached_property
    def new_tokens(self) -> int:
        """The most tokens that a row may emit; transformers' loop looks only after the first one."""
        lengths = [c.max_length for c in self.stopping_criteria if isinstance(c, MaxLengthCriteria)]
        return max(1, min([self.generation_config.max_length, *lengths]) - self.input_ids.shape[1])

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        found = [c.eos_token_id.tolist() for c in self.stopping_criteria if type(c) is EosTokenCriteria]
        return tuple(token for ids in found for token in ids)

    @cached_property
    def watchers(self) -> list[StoppingCriteria]:
        """Criteria that the engine can't know by itself: stop strings, time, the user's own."""
        return [c for c in self.stopping_criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]

    @property
    def pads(self) -> bool:
        """Whether a row that has ended is padded; without an end token, transformers decodes on until all have."""
        return any(hasattr(c, "eos_token_id") for c in self.stopping_criteria)

    @property
    def pad_id(self) -> int:
        pad = self.generation_config._pad_token_tensor
        return 0 if pad is None else int(pad)

    @cached_property
    def _split(self) -> tuple[LogitsProcessorList, dict[str, Any]]:
        """Processors to run before drawing, and the parameters of those whose work a round does on the device.

        These are the warpers at the end, and where nothing is left between them and the logits, what stands before.
        """
        processors, place = list(self.logits_processor), len(_WARPERS)
        params: dict[str, Any] = {}
        while self.generation_config.do_sample and not self.keeps("scores") and processors:
            if _place(processors[-1]) >= place:
                break
            warper = processors.pop()
            place = _place(warper)
            name = ("temperature", "top_k", "top_p", "min_p")[place]
            params[name] = getattr(warper, name)
        vocab_size = self.model.config.get_text_config().vocab_size
        asked = Parameters(self.input_ids.shape[1], self.padding, self.eos_ids, self.new_tokens, vocab_size)
        fields = translated(processors, asked)
        if fields is None or self.keeps("scores") or self.keeps("logits"):
            return LogitsProcessorList(processors), params
        return LogitsProcessorList(), {**params, **fields}

    def keeps(self, name: str) -> bool:
        """Whether "scores" or "logits" of every step are to be returned."""
        config = self.generation_config
        return bool(config.return_dict_in_generate and getattr(config, f"output_{name}"))

    @property
    def processors(self) -> LogitsProcessorList:
        return self._split[0]

    def sequences(self, k: int | None) -> list[Sequence]:
        """One per row. Rows of one prompt fork it. Seeds come from torch's global generator, if the call samples."""
        sampled, count = bool(self.generation_config.do_sample), len(self.input_ids)
        seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (count,)).tolist() if sampled else [0] * count
        values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **self._split[1]}
        values["temperature"] *= sampled
        first: dict[tuple[int, ...], Sequence] = {}
        seqs = []
        for prompt, seed in zip(self.prompts, seeds, strict=True):
            params = SamplingParams(max_tokens=self.new_tokens, seed=seed, k=k, **values)
            seq = Sequence(prompt, params, limit=len(prompt) + self.new_tokens, eos=self.eos_ids)
            seq.parent = first.setdefault(tuple(prompt), seq)
            seq.parent = None if seq.parent is seq else seq.parent
            seqs.append(seq)
        return seqs

    # -- what has no paged form

    def obstacle(self, max_model_len: int | None) -> str | None:
        """The argument that the paged runtime can't honour, and what to do about it; None if there is none."""
        return self._unkept() or self._unknown_kwarg() or self._bad_rows() or self._too_long(max_model_len)

    def _unkept(self) -> str | None:
        config = self.generation_config
        for name in _KEPT:
            if config.return_dict_in_generate and getattr(config, name, None):
                return f"{name}=True: a round keeps no such tensors; leave it out"
        if config.cache_implementation not in (None, "dynamic"):
            return f"cache_implementation={config.cache_implementation!r}: the KV is paged; leave it out"
        for name in _OTHER_ASSISTANTS:
            if getattr(config, name, None):
                return f"{name}={getattr(config, name)!r}: pass assistant_model= or prompt_lookup_num_tokens= instead"
        for processor in self.processors:
            if type(processor).__name__ in _STATEFUL:
                return (
                    f"{_STATEFUL[type(processor).__name__]}=: it keeps state that a rejected draft spoils; leave it out"
                )
        prepare = vars(self.model).get("prepare_inputs_for_generation")
        if prepare and getattr(prepare, "__func__", None) is not type(self.model).prepare_inputs_for_generation:
            return (
                "prepare_inputs_for_generation: replaced on this model, as prompt and prefix tuning of peft do, and not "
                "called by a paged forward; generate without it"
            )
        if torch.is_autocast_enabled(device_of(self.model).type):
            return "torch.autocast: keys and values would differ in dtype there; call generate outside of it"
        return "synced_gpus=True: rounds are not in step between processes; leave it out" if self.synced_gpus else None

    def _unknown_kwarg(self) -> str | None:
        for name, value in self.kwargs.items():
            if name not in _UNDERSTOOD and value is not None and value is not False:
                return f"{name}=: only token ids go into a paged forward; leave it out"
            if name in _CACHES and _is_the_callers(value):
                return f"{name}=: the KV is paged, and another cache is neither read nor filled; leave it out"
        return None

    def _bad_rows(self) -> str | None:
        mask, positions = self.kwargs.get("attention_mask"), self.kwargs.get("position_ids")
        shape, dtype = self.input_ids.shape, self.input_ids.dtype
        if mask is not None and (mask.shape != shape or not ((mask == 0) | (mask == 1)).all()):
            return f"attention_mask: expected zeros and ones of shape {list(shape)}"
        if shape[0] == 0 or any(n == shape[1] for n in self.padding):
            return "input_ids: expected at least one row, and at least one token in each row"
        if dtype.is_floating_point or dtype == torch.bool:
            return f"input_ids: expected token ids, got {dtype}"
        columns = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        padding = torch.tensor(self.padding, device=columns.device)[:, None]
        real = columns >= padding
        if mask is not None and not torch.equal(mask.to(columns.device) != 0, real):
            return "attention_mask: expected padding at the left only; set the tokenizer's padding_side='left'"
        if positions is not None and not _counts_up(positions.to(columns.device), columns - padding, real):
            return (
                "position_ids: expected 0, 1, 2, ... from each row's first token on, as transformers makes them of an "
                "attention_mask that is as long as the prompt; leave it out"
            )
        vocab = self.model.get_input_embeddings().weight.shape[0]
        if any(not 0 <= token < vocab for row in self.prompts for token in row):
            return f"input_ids: expected token ids in 0..{vocab - 1}"
        return None

    def _too_long(self, max_model_len: int | None) -> str | None:
        most = min([n for n in (max_model_len, max_positions(self.model)) if n] or [1 << 62])
        length = max(map(len, self.prompts)) + self.new_tokens
        if length <= most:
            return None
        return f"max_new_tokens={self.new_tokens}: a row could reach {length} tokens, expected at most {most}; lower it"


def _place(processor: Any) -> int:
    """Where in the sampling kernel's order a warper stands; past the end for what the kernel doesn't do."""
    if type(processor) not in _WARPERS or getattr(processor, "top_p", 1) <= 0:
        return len(_WARPERS)
    if getattr(processor, "filter_value", -torch.inf) != -torch.inf or getattr(processor, "min_tokens_to_keep", 1) > 1:
        return len(_WARPERS)
    return _WARPERS.index(type(processor))


def _is_the_callers(cache: Any) -> bool:
    return cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0)


def _counts_up(positions: Tensor, expected: Tensor, real: Tensor) -> bool:
    """Whether `positions` [B or 1, L] are `expected` wherever there is a `real` token."""
    if positions.dim() != 2 or positions.shape[1] != expected.shape[1]:
        return False
    return bool(((positions == expected) | ~real).all())
