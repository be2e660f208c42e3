"""`custom_generate=specdec.hf.generate`: the paged runtime for a single call, on a model that need not be enabled."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from specdec.hf.call import Call
from specdec.hf.plugin import enable, enabled_of
from specdec.shown import shown

_DROPPED = {
    "assistant_model": "pass drafter=, or use specdec.hf.enable(model) and leave custom_generate out",
    "streamer": "pass specdec_streamer=, or use specdec.hf.enable(model) and leave custom_generate out",
    "synced_gpus": "rounds are not in step between processes, so leave it out",
}
"""Arguments that transformers does not hand on to a custom_generate, and what to do instead."""

_MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION}
_OF_OTHER_MODES = ("num_beams", "num_beam_groups", "constraints", "force_words_ids", "penalty_alpha", "dola_layers")


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Any = None,
    k: int | None = None,
    specdec_streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The decoding loop for `model.generate(..., custom_generate=specdec.hf.generate, drafter="lookup", k=10)`.

    drafter, k: as for `enable`. specdec_streamer: a streamer; transformers keeps `streamer=` from a custom loop, and
    gives this one no prompt. An enabled model keeps its engine for the next call, another one builds it for this call.
    input_ids [B, L], left-padded; returns [B, L + emitted], or an output object with `return_dict_in_generate`.

    Raises ValueError naming the argument that the paged runtime can't honour.
    """
    _refuse_dropped()
    _refuse_other_modes(generation_config)
    call = Call(
        model, input_ids, logits_processor, stopping_criteria, generation_config, specdec_streamer, False, model_kwargs
    )
    enabled = enabled_of(model)
    if enabled is None:
        with enable(model) as enabled:
            return enabled.custom(call, drafter, k)
    return enabled.custom(call, drafter, k)


def _refuse_dropped() -> None:
    """Only the frame of transformers' `generate`, which calls this loop, still knows what it doesn't hand on."""
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame and frame.f_back else None
    given = caller.f_locals if caller and caller.f_code.co_name == "generate" else {}
    for name, instead in _DROPPED.items():
        if given.get(name) not in (None, False):
            raise ValueError(f"{name}: transformers does not hand it on to custom_generate; {instead}")


def _refuse_other_modes(config: GenerationConfig) -> None:
    """A custom loop is asked for every mode, and has its rows beside each other whether they are beams or not."""
    if config.get_generation_mode() not in _MODES:
        asked = {name: getattr(config, name, None) for name in _OF_OTHER_MODES}
        named = ", ".join(f"{name}={shown(value)}" for name, value in asked.items() if value not in (None, 1))
        raise ValueError(f"{named}: such a search has no paged form; leave it out, or custom_generate")
