"""`load_model`: a model and its tokenizer from an alias, a hub id, a folder, a .gguf file or a loaded model.

Knows transformers' loading, not paging: what comes back is an ordinary transformers model in eval mode.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdec.advice import advise
from specdec.checkpoint import Checkpoint, find_checkpoint
from specdec.converted import MAX_SOURCE_BYTES, cache_folder, convert, load_gguf
from specdec.shown import shown

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Loaded:
    """What `load_model` returns.

    tokenizer: None for a model that came loaded, and for a folder without one.
    name: what was asked for, or the class of a loaded model.
    source: the folder, file or hub id that the weights came from; None for a loaded model.
    revision: the commit on the hub; None elsewhere.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    source: str | None = None
    revision: str | None = None


def load_model(
    model: str | os.PathLike[str] | torch.nn.Module,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Loaded:
    """Load `model` in eval mode and its tokenizer.

    model: alias ("smollm2-135m"), folder, .gguf file, hub id ("owner/name"), or a transformers model, returned as is.
    dtype: "auto" is fp32 on the CPU, bf16 on a GPU that has it, else fp16. device: "auto" is CUDA if there is one.
    allow_pickle: accept pickled weights (*.bin), which run code of their author when they are loaded.

    Raises TypeError for another type of `model`, ValueError (one line) for whatever cannot be found or read.
    """
    if isinstance(model, torch.nn.Module):
        return _as_it_is(model, revision, dtype, device)
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model: expected a name, a path or a transformers model, got {type(model).__name__}")
    where = pick_device(device)
    numbers = pick_dtype(dtype, where)
    checkpoint = find_checkpoint(os.fspath(model), revision)
    if checkpoint.gguf is not None:
        lm, tokenizer = _load_gguf(checkpoint.gguf, numbers)
    else:
        options = {"trust_remote_code": trust_remote_code, "use_safetensors": None if allow_pickle else True}
        lm, tokenizer = _load_checkpoint(checkpoint, numbers, options)
    if lm.config.is_encoder_decoder:
        raise ValueError(f"model {checkpoint.name!r}: expected a decoder-only language model, got an encoder-decoder")
    commit = getattr(lm.config, "_commit_hash", None) if checkpoint.hub_id else None
    return Loaded(lm.to(where).eval(), tokenizer, checkpoint.name, checkpoint.source, commit)


def pick_device(device: str | torch.device) -> torch.device:
    """The device that `device` names, "auto" being CUDA if there is one. Raises ValueError if it is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f'device: expected "auto", "cpu" or "cuda[:index]", got {shown(device)}') from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "auto", "cpu" or "cuda[:index]", got {shown(device)}')
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {device!r} is not there, CUDA devices found: {torch.cuda.device_count()}")
    return chosen


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that `dtype` names; "auto" is fp32 on the CPU, bf16 on a GPU that has it, else fp16."""
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in _DTYPES.values():
        raise ValueError(f'dtype: expected "auto", float32, bfloat16 or float16, got {shown(dtype)}')
    assert isinstance(chosen, torch.dtype)
    return chosen


def _as_it_is(model: torch.nn.Module, revision: str | None, dtype: Any, device: Any) -> Loaded:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers model, got {type(model).__name__}; of a wrapped one (peft), pass the "
            "transformers model inside"
        )
    if revision is not None:
        raise ValueError(f"revision: only a model of the hub has revisions, got {shown(revision)} for a loaded model")
    if dtype != "auto" and pick_dtype(dtype, model.device) != model.dtype:
        raise ValueError(f'dtype: a loaded model keeps its {model.dtype}; expected that or "auto", got {shown(dtype)}')
    if device != "auto" and pick_device(device).type != model.device.type:
        raise ValueError(
            f'device: a loaded model stays on {model.device}; expected that or "auto", got {shown(device)}'
        )
    return Loaded(model, None, type(model).__name__)


def _load_gguf(gguf: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Through the converted copy, unless the file is so large that its fp32 copy would fill the disk."""
    if gguf.stat().st_size > MAX_SOURCE_BYTES:
        return load_gguf(gguf, dtype)
    try:
        folder = convert(gguf)
    except OSError as error:
        advise(
            f"no converted copy of {gguf.name} is kept, so that it loads slowly each time: {cache_folder()} cannot be "
            f"written ({error}); set SPECDEC_CACHE to a folder that can"
        )
        return load_gguf(gguf, dtype)
    return _load_checkpoint(Checkpoint(gguf.name, folder=folder), dtype, {"use_safetensors": True})


def _load_checkpoint(
    checkpoint: Checkpoint, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    options = {**options, "revision": checkpoint.revision or "main", "local_files_only": checkpoint.local_only}
    try:
        model = AutoModelForCausalLM.from_pretrained(checkpoint.source, dtype=dtype, **options)
        tokenizer = _load_tokenizer(checkpoint, options)
    except Exception as error:  # broken files make transformers and safetensors raise types of their own
        raise ValueError(f"model {checkpoint.name!r}: {_reason(checkpoint, error, options)}") from error
    return model, tokenizer


def _load_tokenizer(checkpoint: Checkpoint, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    folder = checkpoint.folder
    if folder is not None and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    options = {key: value for key, value in options.items() if key != "use_safetensors"}
    return AutoTokenizer.from_pretrained(checkpoint.source, **options)


def _reason(checkpoint: Checkpoint, error: Exception, options: dict[str, Any]) -> str:
    folder = checkpoint.folder
    pickled = options["use_safetensors"] and (
        any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors"))
        if folder is not None
        else "safetensors" in str(error)
    )
    if pickled:
        return (
            "only pickled weights (*.bin) were found, which run code of their author when they are loaded; "
            "pass allow_pickle=True if you trust them"
        )
    if "trust_remote_code" in str(error):
        return "it needs code of its own; read that code, and pass trust_remote_code=True if you trust it"
    return " ".join(str(error).split())
