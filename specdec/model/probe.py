"""Which route serves a model, found by trying: a small random model of its architecture, run on blocks and as it is.

Ragged prompts, several query tokens, a roll-back, windows shorter than the text. What mixes tokens in ways that no list
foresees (recurrent state, positions of its own, sparse attention) differs there, and is refused before it decodes wrongly.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.kvpool import KVSpec
from specdec.model.attention import CallKV
from specdec.model.gathered import GatheredRoute
from specdec.model.hooked import HookedRoute
from specdec.model.packed import Packed
from specdec.model.placement import device_of, refuse_empty
from specdec.model.shrink import shrunk

Route = HookedRoute | GatheredRoute
ROUTES: list[Callable[[PreTrainedModel], Route]] = [
    HookedRoute,
    lambda model: GatheredRoute(model, together=True),
    lambda model: GatheredRoute(model, together=False),
]
"""Fastest first."""

ROUTE_NAMES = ("paged", "gathered", "gathered apart")

_LENGTHS, _NEW = (23, 5, 14), (4, 1, 6)
_BLOCK_SIZE, _WIDTH = 4, 6
_TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Of the largest logit. Random fp32 models of two to eight layers differ by 1e-6 to 1e-5; a wrong mask gives 0.1 to 1."""


_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local"}
_STATELESS_LAYERS = {"mlp", "moe", "dummy"}


@dataclass(frozen=True)
class Verdict:
    """What the probe found. route: index in ROUTES, None if none is right; reasons: why not, of those tried before."""

    route: int | None
    reasons: tuple[str, ...]


_verdicts: dict[tuple[type, str], Verdict] = {}


def route_of(model: PreTrainedModel) -> Route:
    """The fastest route that is right for `model`. Raises ValueError with the reasons if there is none."""
    refuse_empty(model)
    if (dtype := model.get_input_embeddings().weight.dtype) not in _TOLERANCE:
        expected = "float32, bfloat16 or float16"
        raise ValueError(f"model: expected weights in {expected}, got {str(dtype).removeprefix('torch.')}")
    refuse_stateful(_own_class(model), model.config)
    verdict = verdict_of(model)
    if verdict.route is None:
        raise ValueError(f"model: {type(model).__name__} can't be paged: {'; '.join(verdict.reasons)}")
    return ROUTES[verdict.route](model)


def verdict_of(model: PreTrainedModel) -> Verdict:
    """The probe's verdict on the architecture of `model`; one that names a route is kept for its class and config.

    Any other may have come from outside, such as memory that ran out, and the next model is tried again.
    """
    cls = _own_class(model)
    key = (cls, json.dumps(model.config.to_dict(), sort_keys=True, default=str))
    if key in _verdicts:
        return _verdicts[key]
    try:
        small = small_model(cls, model.config)
    except Exception:  # sizes that this class doesn't take: the model itself, then, with its windows as they are
        small = model
    verdict = try_routes(small)
    if verdict.route is not None:
        _verdicts[key] = verdict
    return verdict


def refuse_stateful(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raises ValueError for layers that keep more than KV between tokens: truncating a block table can't undo that."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYERS - _STATELESS_LAYERS
    if getattr(cls, "_is_stateful", False) or kinds:
        raise ValueError(
            f"model: {cls.__name__} can't be paged: its {', '.join(sorted(kinds)) or 'recurrent'} layers keep other state "
            "than KV, which truncating a block table can't roll back"
        )


def small_model(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A random model of `cls` with a shrunk `config`, on the CPU in fp32. Raises what the class raises."""
    with _quiet(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model: Any = cls
        small = model._from_config(shrunk(config), dtype=torch.float32, attn_implementation="eager").eval()
        _randomise(small)
    return small


@torch.inference_mode()
def try_routes(model: PreTrainedModel) -> Verdict:
    """The first route on which `model` gives its own logits."""
    reasons = []
    for number, make in enumerate(ROUTES):
        try:
            with _quiet():
                error = _difference(model, make(model))
        except Exception as failure:
            reasons.append(f"{failure!s:.200}" if isinstance(failure, ValueError) else f"{failure!r:.200}")
            continue
        if error <= _TOLERANCE[model.get_input_embeddings().weight.dtype]:
            return Verdict(number, tuple(reasons))
        reasons.append(f"its logits on blocks differ from its own by {error:.1g} of the largest")
    return Verdict(None, tuple(dict.fromkeys(reasons)))


def _difference(model: PreTrainedModel, route: Route) -> float:
    """The largest difference of logits, as a share of the largest logit, over prompts, several new tokens and a roll-back."""
    device, generator = device_of(model), torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    texts = [
        torch.randint(8 if vocab > 16 else 0, min(vocab, 88), (n,), generator=generator).tolist() for n in _LENGTHS
    ]
    starts = [n - new for n, new in zip(_LENGTHS, _NEW, strict=True)]
    back = [n - (new + 1) // 2 for n, new in zip(_LENGTHS, _NEW, strict=True)]
    later = [text[:b] + text[b - 1 : -1] for text, b in zip(texts, back, strict=True)]
    tables = torch.randperm(len(texts) * _WIDTH, generator=generator).view(len(texts), _WIDTH).int()
    specs = route.record()
    route.attach([CallKV(_poisoned(spec, spec.head_dim), _poisoned(spec, spec.v_head_dim)) for spec in specs])
    worst = 0.0
    try:
        for lines, begin, end in ((texts, [0] * 3, starts), (texts, starts, _LENGTHS), (later, back, _LENGTHS)):
            packed = _packed(lines, begin, end, tables).to(device)
            got = cast(Tensor, route.run(packed, True))
            for row, (line, a, b) in enumerate(zip(lines, begin, end, strict=True)):
                want = model(input_ids=torch.tensor([line], device=device), use_cache=False).logits[0, a:b]
                rows = slice(*packed.cu_seqlens_q[row : row + 2].tolist())
                error = float((got[rows] - want).abs().max() / want.abs().max())
                worst = max(worst, math.inf if math.isnan(error) else error)
    finally:
        route.detach()
    return worst


def _poisoned(spec: KVSpec, dim: int) -> Tensor:
    shape = (len(_LENGTHS) * _WIDTH, _BLOCK_SIZE, spec.num_kv_heads, dim)
    return torch.full(shape, math.nan, dtype=spec.dtype, device=spec.device)


def _packed(lines: list[list[int]], begin: Any, end: Any, tables: Tensor) -> Packed:
    """The tokens begin..end of each line, over its row of `tables`."""
    spans = [(r, p) for r, (a, b) in enumerate(zip(begin, end, strict=True)) for p in range(a, b)]
    slots = [int(tables[r, p // _BLOCK_SIZE]) * _BLOCK_SIZE + p % _BLOCK_SIZE for r, p in spans]
    lengths = [b - a for a, b in zip(begin, end, strict=True)]
    return Packed(
        token_ids=torch.tensor([lines[r][p] for r, p in spans]),
        positions=torch.tensor([p for _, p in spans]),
        slot_mapping=torch.tensor(slots),
        block_table=tables,
        seq_lens=torch.tensor(end, dtype=torch.int32),
        cu_seqlens_q=torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32),
        max_seqlen_q=max(lengths),
    )


def _randomise(model: PreTrainedModel) -> None:
    """Weights that are large enough for a wrong mask to show in the logits."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.2 / math.sqrt(parameter.shape[-1]))
            elif "sink" in name:
                parameter.copy_(noise)
            else:
                parameter.add_(noise * 0.1)


def _own_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of `model`, below one that the plug-in has put over it."""
    return next(c for c in type(model).__mro__ if "_specdec" not in vars(c))


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it transformers doesn't comment on configs that nobody wrote."""
    logger = transformers.logging.get_logger("transformers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
