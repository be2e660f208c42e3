"""Converted copies of GGUF checkpoints: dequantised once, kept as safetensors in the user's cache folder.

Reading a GGUF takes transformers tens of seconds, its copy about one. The copy is fp32, as dequantising yields it:
of SmolLM2-135M at Q4_1, fp16 would round 42 % of the weights and bf16 79 %, and 538 MB is affordable.

A copy is a folder named for the SHA-256 of its source. `manifest.json` holds the SHA-256 of every file in it and is
written last; a folder whose files differ is rebuilt. Building happens beside it and ends in one rename.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdec.advice import advise

MAX_SOURCE_BYTES = 1 << 30
_FORMAT = 1
_MANIFEST = "manifest.json"
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_TOKENIZER_FIELDS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", *_SPECIAL_TOKENS.values())
_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where copies are kept: $SPECDEC_CACHE, else `specdec` in $XDG_CACHE_HOME, else ~/.cache/specdec."""
    own = os.environ.get("SPECDEC_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(gguf: Path) -> Path:
    """The folder of the converted copy of `gguf`, built if it is missing, stale or damaged.

    Some 30 s when it is built, else the time to hash source and copy (0.5 s for SmolLM2-135M).

    Raises ValueError if the `gguf` package is missing or the file cannot be read, OSError if the cache folder
    cannot be written.
    """
    source = file_sha256(gguf)
    copy = cache_folder() / "gguf" / f"{gguf.stem}-{source[:16]}"
    if _is_intact(copy, source):
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    _log.info("converting %s into %s (once)", gguf, copy)
    building = Path(tempfile.mkdtemp(prefix=f"{copy.name}.building-", dir=copy.parent))
    try:
        _write_copy(*load_gguf(gguf, torch.float32), building)
        _write_manifest(building, source)
        _put_in_place(building, copy, source)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return copy


def load_gguf(gguf: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer straight from a GGUF file, on the CPU, its tensors dequantised to `dtype`.

    Raises ValueError, one line, if the `gguf` package is missing or transformers cannot read the file.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"reading {gguf.name} needs the gguf package: pip install gguf (or specdec[demo])")
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # whatever a broken or foreign file makes the parser raise
        raise ValueError(f"cannot read {gguf}: {' '.join(str(error).split())}") from error
    _complete(tokenizer, gguf)
    return model, tokenizer


def _complete(tokenizer: Any, gguf: Path) -> None:
    """What the file says about its tokenizer and some version of transformers drops.

    Special tokens: 5.17 takes SmolLM2's <|im_start|> for the end token. Decoder: 5.17 puts SentencePiece's before the
    byte-level one. Digits: "smollm" isolates each before the byte-level split; without it "  2" is three tokens, not 2.
    """
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    said = {key: fields[key].contents() for key in _TOKENIZER_FIELDS if key in fields}
    for name, key in _SPECIAL_TOKENS.items():
        if key in said:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(said[key])))
    if said.get("tokenizer.ggml.model") == "gpt2":
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    if said.get("tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.clean_up_tokenization_spaces = False  # text is exactly what the tokens say


def _write_copy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Plain config, weights and tokenizer. Not `model.save_pretrained`: it refuses a model that came from a GGUF."""
    config = type(model.config).from_dict(_without(model.config.to_dict(), "quantization_config", "_name_or_path"))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(_untied(model), folder / "model.safetensors", metadata={"format": "pt"})


def _untied(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict with each storage once: loading ties the others again, as the config says."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    return tensors


def _write_manifest(folder: Path, source: str) -> None:
    files = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "source": source, "files": files}, indent=1))


def _is_intact(copy: Path, source: str) -> bool:
    try:
        manifest = json.loads((copy / _MANIFEST).read_text())
        if (manifest["format"], manifest["source"]) != (_FORMAT, source):
            return False
        return all(file_sha256(copy / name) == digest for name, digest in manifest["files"].items())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        advise(f"the converted copy in {copy} is unreadable and will be rebuilt: {error}")
        return False


def _put_in_place(building: Path, copy: Path, source: str) -> None:
    """Rename `building` to `copy`. A copy that another process finished meanwhile is as good; a damaged one goes."""
    if copy.exists() and not _is_intact(copy, source):
        copy.rename(building.with_name(building.name + ".damaged"))
        shutil.rmtree(building.with_name(building.name + ".damaged"), ignore_errors=True)
    try:
        building.rename(copy)
    except OSError:
        if not _is_intact(copy, source):
            raise


def _without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}
