"""The plug-in: a model object whose `generate` decodes on the paged runtime, and is otherwise what it was.

`generate` looks up its decoding loop on the model's class, so an enabled model gets a class of its own, between two
lines of the same name: its loops ask whether the call has a paged form, and run transformers' own where it has none.
"""

from __future__ import annotations

import copy
import copyreg
import gc
import os
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode

from specdec.advice import advise
from specdec.draft import LookupDrafter, check_vocabulary
from specdec.hf.call import Call
from specdec.hf.session import Need, Options, Session
from specdec.limits import Wishes, learned_positions
from specdec.loading import load_model
from specdec.model import decoder_layers, device_of, kv_specs
from specdec.options import check_drafter_type
from specdec.sampling import MOST_DRAFTS, check_int
from specdec.shown import shown
from specdec.stats import EngineStats

LLM_OPTIONS = (
    "max_model_len", "max_rows", "kv_memory", "kv_dtype", "kv_scales", "block_size", "prompt_budget", "graphs", "compile",
    "lag",
)  # fmt: skip

_DEFAULT_ASSISTANT_TOKENS = 20

_enabled: weakref.WeakSet[Enabled] = weakref.WeakSet()
_paged = threading.RLock()
"""One paged forward runs at a time in a process, so calls of several threads take turns."""


class Enabled:
    """A model with the plug-in: what `enable` returns. As a context manager it disables the model at its end.

    plain: whether calls without assistance run on the paged runtime too, with `drafter` (None: no drafts).
    """

    def __init__(self, model: PreTrainedModel, drafter: Any, plain: bool, options: Options):
        self.model, self.drafter, self.plain, self.options = model, drafter, plain, options
        self.own_class = type(model)
        self.paged_class = _paged_class(self)
        self.session: Session | None = None
        self._lookups: dict[int | None, Any] = {None: "lookup"}
        model.__class__ = self.paged_class
        _enabled.add(self)

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        disable(self.model)

    @property
    def stats(self) -> EngineStats | None:
        """Counts since the engine was built: acceptance length, rounds, tokens. None before the first paged call."""
        return self.session.engine.stats if self.session else None

    def release(self) -> None:
        """Give the KV memory back; the next paged call builds its engine anew."""
        if self.session is None:
            return
        if self.session.busy:
            raise RuntimeError(f"model: this {type(self.model).__name__} is decoding; let its generate end first")
        self.session.close()
        self.session = None
        if (
            device_of(self.model).type == "cuda"
        ):  # its graphs are in cycles, and the next engine is sized by what is free
            gc.collect()
            torch.cuda.empty_cache()

    def run(self, call: Call, drafter: Any, k: int | None) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode `call`, drafts by `drafter` (None: none), k of them per row and round (None: as enabled)."""
        with _paged:
            session = self._session(drafter, call)
            try:
                output = session.run(call, 0 if drafter is None else k)
            except BaseException:
                if not session.engine.idle:
                    self.release()
                raise
        return output if call.generation_config.return_dict_in_generate else output.sequences

    def lookup(self, config: GenerationConfig) -> tuple[Any, int]:
        """Drafter and k of a call that asks for look-up; one object for each longest match: engines go with their drafter.

        Raises TypeError or ValueError naming the argument.
        """
        check_int("prompt_lookup_num_tokens", config.prompt_lookup_num_tokens, 1, MOST_DRAFTS)
        longest = config.max_matching_ngram_size or None  # transformers takes 0 for its default, too
        if longest is not None:
            check_int("max_matching_ngram_size", longest, 1)
            self._lookups.setdefault(longest, LookupDrafter(max_match=longest))
        return self._lookups[longest], config.prompt_lookup_num_tokens

    def _longest(self, drafter: Any) -> int | None:
        """Tokens of a row at most, with drafts by `drafter`; None where only the model's positions count."""
        learned = learned_positions(drafter) if isinstance(drafter, PreTrainedModel) else None
        return min(filter(None, [self.options.llm.get("max_model_len"), learned]), default=None)

    def _session(self, drafter: Any, call: Call) -> Session:
        need = Need.of(call, self.options.llm.get("block_size", 16))
        if self.session and not self.session.serves(drafter, need):
            need |= self.session.need
            if drafter is None and need.length <= (self._longest(self.session.drafter) or need.length):
                drafter = self.session.drafter
            self.release()
        if self.session is None:
            models = {id(self.model), id(drafter)}
            for other in list(_enabled):  # a model is paged in one engine at a time
                if other.session and models & {id(m) for m in other.session.models}:
                    other.release()
            self.session = Session(self.model, drafter, self.options, need)
        return self.session

    # -- transformers' loops

    def sample(self, call: Call) -> Tensor | GenerateDecoderOnlyOutput | None:
        """A call without assistance; None if it is not for the paged runtime."""
        if not self.plain or call.generation_config.is_assistant:
            return None
        drafter = self._own_drafter()
        obstacle = call.obstacle(self._longest(drafter))
        if obstacle:
            advise(f"decoded by transformers, not by specdec: {obstacle}")
            return None
        return self.run(call, drafter, self.options.k)

    def assist(
        self, call: Call, misfit: str | None, assistant: PreTrainedModel | None
    ) -> Tensor | GenerateDecoderOnlyOutput | None:
        """A call with assistance; None if it is left to transformers, which can only do batch 1.

        assistant: None for look-up; misfit: why it can't draft here.
        Raises ValueError naming the argument that has no paged form where transformers has no batched form either.
        """
        config = call.generation_config
        obstacle = misfit or self._unpaged(assistant) or call.obstacle(self._longest(assistant))
        if obstacle is None:
            drafter, k = (assistant, _drafts(config)) if assistant is not None else self.lookup(config)
            return self.run(call, drafter, self.options.k if k is None else k)
        if len(call.input_ids) > 1:
            raise ValueError(f"{obstacle} (transformers' own assisted decoding is for a batch of one)")
        advise(f"assisted by transformers, not by specdec: {obstacle}")
        return None

    def custom(self, call: Call, drafter: Any, k: int | None) -> Tensor | GenerateDecoderOnlyOutput:
        """A call that asked for the paged runtime by name. Raises ValueError for what has no paged form."""
        check_drafter_type(drafter)
        _check_k(k)
        drafter = self._own_drafter() if drafter is None else self._loaded(drafter)
        obstacle = call.obstacle(self._longest(drafter))
        if isinstance(drafter, PreTrainedModel):
            obstacle = obstacle or _misfit(self.model, {"assistant_model": drafter})
        if obstacle:
            raise ValueError(obstacle.replace("assistant_model:", "drafter:"))
        if call.generation_config.prompt_lookup_num_tokens is not None:
            if drafter is not None:
                raise ValueError("prompt_lookup_num_tokens: expected either it or drafter=, got both")
            drafter, number = self.lookup(call.generation_config)
            return self.run(call, drafter, number if k is None else k)
        return self.run(call, drafter, k)

    def _unpaged(self, assistant: Any) -> str | None:
        """Why the assistant of a call can't be paged beside the target; None if it can, or there is none."""
        if assistant is None or (self.session and self.session.drafter is assistant):
            return None
        if {*decoder_layers(self.model)} & {*decoder_layers(assistant)}:
            return "assistant_model: it shares layers with the target, whose KV is in them; pass a deep copy"
        try:
            kv_specs(assistant)
        except ValueError as error:
            return str(error).replace("model:", "assistant_model:", 1)
        return None

    def _own_drafter(self) -> Any:
        self.drafter = self._loaded(self.drafter)
        return self.drafter

    def _loaded(self, drafter: Any) -> Any:
        if isinstance(drafter, (str, os.PathLike)) and drafter != "lookup":
            return load_model(drafter, dtype=self.model.dtype, device=device_of(self.model)).model
        return drafter


def enable(
    model: PreTrainedModel,
    drafter: Any = None,
    k: int | None = None,
    *,
    plain: bool = False,
    prefix_cache: bool = False,
    **options: Any,
) -> Enabled:
    """From now on `model.generate` with `assistant_model=` or `prompt_lookup_num_tokens=` decodes on the paged runtime.

    drafter: None, "lookup", a model, its name or folder, or an object with `propose(rows, k)`: then calls without
    assistance are drafted for by it. plain: run those on the paged runtime without a drafter, too.
    k: drafts per row and round at most, None for the drafter's usual number; a call's own number goes before it.
    prefix_cache: reuse KV of equal beginnings from one call to the next, as long as no weight is written to.
    options: max_model_len, max_rows, kv_memory and others of `LLM`; sizes that are not given follow the calls.

    Everything else about the model stays as it is. Enabling again replaces the settings. Returns a context manager.
    Raises TypeError or ValueError for a model that can't be paged and for options that are none.
    """
    _check_model(model)
    unknown = sorted(set(options) - set(LLM_OPTIONS))
    if unknown:
        raise TypeError(f"enable: expected options among {', '.join(LLM_OPTIONS)}, got {', '.join(unknown)}")
    Wishes(**{name: options[name] for name in options if name in Wishes.__dataclass_fields__})
    check_drafter_type(drafter)
    _check_k(k)
    disable(model)
    kv_specs(model, options.get("kv_dtype", "auto"))  # raises if paging can't serve it
    return Enabled(model, drafter, plain or drafter is not None, Options(k, prefix_cache, options))


def disable(model: PreTrainedModel) -> None:
    """Undo `enable`: the model has its own class again, and the KV memory is given back. Else nothing happens.

    Raises RuntimeError while it decodes, and if something else has changed its class since.
    """
    enabled = enabled_of(model)
    if enabled is None:
        return
    if type(model) is not enabled.paged_class:
        raise RuntimeError(f"model: its class became {type(model).__name__} since it was enabled; undo that first")
    enabled.release()
    model.__class__ = enabled.own_class
    _enabled.discard(enabled)


def enabled_of(model: Any) -> Enabled | None:
    """The plug-in of an enabled model, else None."""
    return getattr(type(model), "_specdec", None)


def _paged_class(enabled: Enabled) -> type:
    """A subclass of the model's class with its name, whose decoding loops go through `enabled`."""
    own: Any = enabled.own_class

    class Paged(own):
        _specdec = enabled

        def _sample(self, input_ids: Tensor, **arguments: Any) -> Any:
            result = enabled.sample(_call(self, input_ids, arguments))
            return own._sample(self, input_ids, **arguments) if result is None else result

        def _assisted_decoding(
            self, input_ids: Tensor, inputs_tensor: Any = None, assistant_model: Any = None, **arguments: Any
        ) -> Any:
            named = {"assistant_model": assistant_model, **arguments}
            result = enabled.assist(_call(self, input_ids, arguments), _misfit(self, named), assistant_model)
            if result is None:
                mode, config = GenerationMode.ASSISTED_GENERATION, arguments["generation_config"]
                own._validate_generation_mode(self, mode, config, {n: v for n, v in named.items() if v is not None})
                result = own._assisted_decoding(self, input_ids, inputs_tensor=inputs_tensor, **named)
            return result

        def _validate_generation_mode(self, mode: Any, config: GenerationConfig, arguments: dict[str, Any]) -> None:
            if mode == GenerationMode.ASSISTED_GENERATION:
                # Several samples of a prompt are rows like any others here, and vocabularies may be padded differently.
                config = copy.copy(config)
                config.num_return_sequences = 1
                if _padded_apart(self, arguments):
                    arguments = {name: arguments[name] for name in arguments if name != "assistant_model"}
            own._validate_generation_mode(self, mode, config, arguments)

        def _prepare_cache_for_generation(self, config: GenerationConfig, model_kwargs: Any, *rest: Any) -> Any:
            for name in ("cache", "past_key_values"):
                if model_kwargs.get(name) is not None:
                    model_kwargs[name]._is_user_defined = True
            return own._prepare_cache_for_generation(self, config, model_kwargs, *rest)

        def __reduce_ex__(self, protocol: Any) -> Any:
            # A copy is an ordinary model of its own: no fused product or KV of this one may be part of it.
            enabled.release()
            _, _, state, *_ = super().__reduce_ex__(protocol)
            return copyreg._reconstructor, (own, object, None), state  # type: ignore[attr-defined]

    Paged.__name__, Paged.__qualname__ = own.__name__, own.__qualname__
    Paged.__module__, Paged.__doc__ = own.__module__, own.__doc__
    return Paged


def _call(model: Any, input_ids: Tensor, arguments: dict[str, Any]) -> Call:
    kwargs = dict(arguments)
    named = {
        name: kwargs.pop(name, None)
        for name in ("logits_processor", "stopping_criteria", "generation_config", "streamer")
    }
    synced = bool(kwargs.pop("synced_gpus", False))
    for name in ("tokenizer", "assistant_tokenizer"):
        kwargs.pop(name, None)
    return Call(model, input_ids, **named, synced_gpus=synced, kwargs=kwargs)


def _misfit(model: PreTrainedModel, arguments: dict[str, Any]) -> str | None:
    """Why the assistant of a call can't draft on the target's blocks; None if it can, or there is none."""
    assistant = arguments.get("assistant_model")
    if assistant is None:
        return None
    if assistant is model:
        return "assistant_model: expected another model object than the target"
    if not isinstance(assistant, PreTrainedModel):
        kind = type(assistant).__name__
        return (
            f"assistant_model: expected a transformers model, got {kind}; of a wrapped one (peft), pass the one inside"
        )
    try:
        check_vocabulary(model, assistant, arguments.get("tokenizer"), arguments.get("assistant_tokenizer"))
    except ValueError as error:
        return str(error).replace("drafter:", "assistant_model:")
    return None


def _padded_apart(model: PreTrainedModel, arguments: dict[str, Any]) -> bool:
    """Whether the assistant has the target's vocabulary, but not its number of embedding rows."""
    assistant = arguments.get("assistant_model")
    if assistant is None or _misfit(model, arguments):
        return False
    return assistant.config.get_text_config().vocab_size != model.config.get_text_config().vocab_size


def _drafts(config: GenerationConfig) -> int | None:
    """The call's own number of drafts; transformers' default is no wish of anybody."""
    number = config.num_assistant_tokens
    if number in (None, _DEFAULT_ASSISTANT_TOKENS):
        return None
    check_int("num_assistant_tokens", number, 0, MOST_DRAFTS)
    return number


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers model, got {type(model).__name__}; of a wrapped one (peft), enable the "
            "transformers model inside"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder-only language model, got {type(model).__name__}")


def _check_k(k: Any) -> None:
    if k is not None and (isinstance(k, bool) or not isinstance(k, int)):
        raise TypeError(f"k: expected None or an int, got {type(k).__name__} {shown(k)}")
    if k is not None and k < 0:
        raise ValueError(f"k: expected at least 0, got {shown(k)}")
