"""What the options of an LLM mean for the models and the device at hand; those that can't be are refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.checkpoint import find_checkpoint
from specdec.draft import Drafter, ModelDrafter
from specdec.kernels.check import FP8
from specdec.kvpool import KVSpec
from specdec.model import KVScales, PagedModel, scales_for
from specdec.sampling import MOST_DRAFTS, check_int
from specdec.shown import shown

AUTO_K = {"lookup": 15, "model": 8, "own": 4}


def check_drafter_type(drafter: Any) -> None:
    if drafter is not None and not isinstance(drafter, (str, os.PathLike, PreTrainedModel, Drafter)):
        raise TypeError(
            f'drafter: expected None, "lookup", a model or an object with propose(rows, k), got {type(drafter).__name__}'
        )


def check_drafter(drafter: Any) -> None:
    """Before any weights are loaded: of a kind that there is, and found, if it is a name."""
    check_drafter_type(drafter)
    if isinstance(drafter, (str, os.PathLike)) and drafter != "lookup":
        try:
            find_checkpoint(os.fspath(drafter))
        except ValueError as error:
            raise ValueError(f'drafter: expected None, "lookup" or a model; {error}') from error


@contextmanager
def naming_the_drafter() -> Iterator[None]:
    """Within it an error about a model is about the draft model, and says so."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("model:", "drafter:", 1)) from error


def check_k(k: int | str, kind: str) -> int:
    if k == "auto":
        return AUTO_K.get(kind, 0)
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f'k: expected "auto" or an int, got {type(k).__name__} {shown(k)}')
    check_int("k", k, 0, MOST_DRAFTS)
    return k


def kv_scales(model: PreTrainedModel, specs: list[KVSpec], wish: Any = None, tokenizer: Any = None) -> KVScales | None:
    """Scales of a model whose KV is as `specs` say, None if that is not fp8."""
    if specs[0].dtype == FP8:
        return scales_for(model, wish, tokenizer)
    if wish is not None:
        raise ValueError(f'kv_scales: expected kv_dtype="fp8" beside them, got KV in {specs[0].dtype}')
    return None


def lag(lag: int | None, device: torch.device) -> int:
    """On a GPU the host works a round behind, so that its work hides behind the device's."""
    return lag if lag is not None else int(device.type != "cpu")


def on_gpu(name: str, wish: bool | str, device: torch.device) -> bool:
    """A switch that is on by itself on a GPU. Raises ValueError where it is asked for without one."""
    if wish == "auto":
        return device.type == "cuda"
    if not isinstance(wish, bool):
        raise TypeError(f'{name}: expected "auto" or a bool, got {type(wish).__name__} {shown(wish)}')
    if wish and name == "graphs" and device.type != "cuda":
        raise ValueError(f"graphs: CUDA graphs need a GPU, the model is on {device}")
    return wish


def can_be_captured(wish: bool | str, target: PagedModel, drafter: Any) -> bool:
    """Whether rounds can be CUDA graphs with these models. Raises ValueError if they can't and it was asked for."""
    models = [target, *([drafter.model] if isinstance(drafter, ModelDrafter) else [])]
    reasons = [m.slow for m in models if m.slow] or [
        f"the drafter is on {m.device}, the target on {target.device}" for m in models if m.device != target.device
    ]
    if reasons and wish is True:
        raise ValueError(f"graphs: {reasons[0]}; leave graphs out")
    return not reasons


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
