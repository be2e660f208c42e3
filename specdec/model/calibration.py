"""Calibration: how large keys and values get, by running a few hundred tokens through the model in its own dtype."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.kvpool import KVPool, KVSpec
from specdec.model.attention import CallKV
from specdec.model.packed import Packed
from specdec.model.paged import record, refuse_in_use
from specdec.model.placement import device_of
from specdec.model.probe import Route, route_of
from specdec.model.scales import KVScales
from specdec.shown import shown

_CHUNK = 512
"""Tokens of a forward at most, so that a long text takes no more memory than a prompt chunk does."""

_TEXTS, _LENGTH = 4, 128
"""Of random tokens, where nobody gives others. On SmolLM2 real prompts go at most 2.3 times past what these reach."""


def scales_for(model: PreTrainedModel, wish: Any = None, tokenizer: Any = None) -> KVScales:
    """Scales for the KV of `model` in fp8: given, read from a file of `KVScales.save`, or calibrated.

    wish: KVScales, a path, texts (strings or token ids each) to calibrate on, or None for random tokens.
    Raises TypeError for another wish, else ValueError as `KVScales.load` and `calibrate` do.
    """
    if isinstance(wish, KVScales):
        return wish
    if isinstance(wish, (str, os.PathLike)):
        return KVScales.load(Path(wish))
    if wish is None:
        return calibrate(model, _random_texts(model))
    if not isinstance(wish, (list, tuple)):
        raise TypeError(
            f"kv_scales: expected None, KVScales, a file of them or a list of texts, got {type(wish).__name__}"
        )
    texts = [_encoded(text, tokenizer) for text in wish]
    _check_ids(texts, model.get_input_embeddings().weight.shape[0])
    return calibrate(model, texts)


def _random_texts(model: PreTrainedModel) -> list[list[int]]:
    """Of all the tokens there are; the first is what texts of this model begin with, where it has such a token."""
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(0)
    length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    size = (_TEXTS, length)
    texts = torch.randint(0, model.get_input_embeddings().weight.shape[0], size, generator=generator).tolist()
    bos = getattr(config, "bos_token_id", None)
    return [[bos, *text[1:]] for text in texts] if isinstance(bos, int) else texts


def _encoded(text: Any, tokenizer: Any) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    if tokenizer is None:
        raise ValueError("kv_scales: texts need a tokenizer, and this model came without one; give token ids")
    return tokenizer(text)["input_ids"]


def _check_ids(texts: list[list[int]], vocab_size: int) -> None:
    for token in (token for text in texts for token in text):
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"kv_scales: expected token ids in 0..{vocab_size - 1}, got {shown(token)}")


@torch.inference_mode()
def calibrate(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> KVScales:
    """Scales for the KV of `model` in fp8, from its keys and values of `texts`, token ids each.

    Raises ValueError for a text without tokens, for keys or values that are not finite, and for a model that can't be
    paged or is in use by an LLM.
    """
    refuse_in_use(model)
    if not texts or not all(texts):
        raise ValueError(f"kv_scales: expected texts of at least one token each, got {len(texts)}, some of them empty")
    route = route_of(model)
    specs, device = record(route), device_of(model)
    caches = _caches(specs, max(map(len, texts)))
    most = [(torch.zeros(spec.num_kv_heads), torch.zeros(spec.num_kv_heads)) for spec in specs]
    route.attach(caches)
    try:
        for text in texts:
            _run(route, torch.tensor(text, device=device))
            for (k, v), kv in zip(most, caches, strict=True):
                _note(k, kv.k[0, : len(text)])
                _note(v, kv.v[0, : len(text)])
    finally:
        route.detach()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the pool is sized by what is free
    return KVScales.of(*zip(*most, strict=True))


def _caches(specs: Sequence[KVSpec], size: int) -> list[CallKV]:
    """One block that holds the longest text."""
    return [CallKV(k, v) for k, v in KVPool(1, size).add_model("calibration", specs)]


def _run(route: Route, ids: Tensor) -> None:
    """Extend one sequence in chunks."""
    for start in range(0, len(ids), _CHUNK):
        positions = torch.arange(start, min(start + _CHUNK, len(ids)), device=ids.device)
        route.run(
            Packed(
                token_ids=ids[positions],
                positions=positions,
                slot_mapping=positions,
                block_table=torch.zeros(1, 1, dtype=torch.int32, device=ids.device),
                seq_lens=torch.tensor([start + len(positions)], dtype=torch.int32, device=ids.device),
                cu_seqlens_q=torch.tensor([0, len(positions)], dtype=torch.int32, device=ids.device),
                max_seqlen_q=len(positions),
            ),
            False,
        )


def _note(most: Tensor, values: Tensor) -> None:
    """Raise `most` [Hkv] to the largest magnitudes of `values` [n, Hkv, D]; NaN stays."""
    torch.maximum(most, values.abs().amax((0, 2)).float().cpu(), out=most)
