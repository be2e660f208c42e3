"""PagedModel: a Hugging Face causal LM with one verb, extend: run the tokens past what is cached.

Prompts, prompt chunks, plain decoding, verification and draft steps are `extend` with other lengths. It knows tensors;
sequences, rounds and blocks are the business of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.kernels import plan_attention
from specdec.kvpool import KVPool, KVSpec
from specdec.model.attention import NAME, LayerKV, Recording, Step, paged, take_turns, window_of
from specdec.model.fusion import Fused, LinearWatch, fuse_linears
from specdec.model.layers import CompiledLayers, decoder_layers
from specdec.model.products import Product
from specdec.model.taps import Taps

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention", "global", "local"}


@dataclass(slots=True)
class Packed:
    """Tokens of R sequences, one after another. N may exceed cu_seqlens_q[-1]; what lies past it is padding.

    token_ids, positions [N] int64; slot_mapping [N] int64, -1 writes nothing; block_table [R, M] int32, -1 unused;
    seq_lens [R] int32, the new tokens included; cu_seqlens_q [R + 1] int32; max_seqlen_q bounds a sequence's tokens.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int


class PagedModel:
    """`model` with its KV in `pool`, under `name`. The model object stays as it was outside of `extend`.

    fuse: run products that share an input as one (fusion.py); compiled: compile its layers (layers.py).
    Raises ValueError for a model that paging can't serve: recurrent or convolution state, no AttentionInterface.
    """

    def __init__(self, model: PreTrainedModel, pool: KVPool, name: str, *, fuse: bool = True, compiled: bool = False):
        if any(vars(module).get("specdec_kv") is not None for module in model.modules()):
            raise ValueError(
                f"model: this {type(model).__name__} object is in use by another LLM; close that one first"
            )
        self.model, self.pool, self.name = model, pool, name
        self.configs = configs_of(model)
        with LinearWatch(model) as watch:
            self._calls = record(model)
        fused = fuse_linears(watch.groups()) if fuse else []
        self.products: list[Fused | Product] = [*fused, *self._others(watch, fused)]
        self.layers = CompiledLayers(model) if compiled else None
        self._taps: list[Taps] = []
        self._turns = take_turns(model.base_model)
        if self.layers:
            self.layers.attach()
        weight = model.get_input_embeddings().weight
        self._kind, self._addresses = (weight.dtype, weight.device), [w.data_ptr() for w in model.parameters()]
        caches = pool.add_model(name, [spec for _, spec in self._calls])
        self._attach(caches)

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding: ids past it must not reach the model."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @overload
    def extend(self, packed: Packed, *, logits: Literal[True] = True, prompt: bool = False) -> Tensor: ...
    @overload
    def extend(self, packed: Packed, *, logits: Literal[False]) -> None: ...
    @torch.inference_mode()
    def extend(self, packed: Packed, *, logits: bool = True, prompt: bool = False) -> Tensor | None:
        """Run the packed tokens, writing their KV; [N, vocab] logits of every token, or nothing with `logits=False`.

        Only forwards with logits use compiled layers, but those of a `prompt`: their numbers of tokens are not few.
        """
        step = Step(
            packed.slot_mapping,
            packed.block_table,
            packed.seq_lens,
            packed.cu_seqlens_q,
            packed.max_seqlen_q,
            plan_attention(packed.block_table, packed.seq_lens, packed.cu_seqlens_q, packed.max_seqlen_q),
            compiled=logits and not prompt,
        )
        arguments = {"input_ids": packed.token_ids[None], "position_ids": packed.positions[None], "use_cache": False}
        with paged(self.configs, step):
            if logits:
                out = self.model(**arguments).logits[0]
            else:
                self.model.base_model(**arguments)
                out = None
        if step.calls != len(self._calls):
            raise RuntimeError(
                f"{type(self.model).__name__}: expected {len(self._calls)} paged attention calls in a forward, got "
                f"{step.calls}; did something else set the model's attention implementation?"
            )
        return out

    def tap(self, layers: Iterable[int]) -> Taps:
        """Note the hidden states after decoder layers `layers` in every later `extend`, until the taps are closed.

        Tap before the first round where rounds are CUDA graphs: a graph holds what was there when it was captured.
        Raises ValueError for a number that is no layer's.
        """
        taps = Taps(decoder_layers(self.model), layers)
        self._taps.append(taps)
        return taps

    def refresh(self) -> bool:
        """Whether weights have been replaced by other tensors since the last call; fused copies take them in.

        Raises ValueError for weights of another dtype or device: KV and fused copies are of the old one.
        """
        kind, now = self._kind, self.model.get_input_embeddings().weight
        if (now.dtype, now.device) != kind:
            raise ValueError(
                f"model: expected weights of {kind[0]} on {kind[1]}, as when it was loaded, got {now.dtype} on {now.device}"
            )
        for product in self.products:
            if isinstance(product, Fused):
                product.refresh()
        before, self._addresses = self._addresses, [w.data_ptr() for w in self.model.parameters()]
        return self._addresses != before

    def close(self) -> None:
        """Give the KV back; the model object keeps no trace."""
        for taps in self._taps:
            taps.close()
        for hook in self._turns:
            hook.remove()
        for module in {module for module, _ in self._calls}:
            del module.specdec_kv
        if self.layers:
            self.layers.detach()
        for product in self.products:
            product.detach()
        self.pool.remove_model(self.name)

    def _others(self, watch: LinearWatch, fused: list[Fused]) -> list[Product]:
        """The linear modules that were not fused: their products are ours too."""
        done = {linear for group in fused for linear in group.linears}
        products = [Product(linear) for linear in watch.linears() if linear not in done]
        for product in products:
            product.attach()
        return products

    def _attach(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        layers: dict[nn.Module, LayerKV] = {}
        for (module, _), cache in zip(self._calls, caches, strict=True):
            layers.setdefault(module, LayerKV([], window_of(module))).caches.append(cache)
        for module, layer in layers.items():
            module.specdec_kv = layer  # type: ignore[assignment]


def kv_specs(model: PreTrainedModel) -> list[KVSpec]:
    """The KV tensors that `model` needs, one per attention call of a forward; to size a pool before making it."""
    return [spec for _, spec in record(model)]


@torch.inference_mode()
def record(model: PreTrainedModel) -> list[tuple[nn.Module, KVSpec]]:
    """Run one token through `model`, noting each attention call. Raises ValueError where paging would be wrong."""
    _refuse_stateful(model)
    recording, device = Recording(), model.get_input_embeddings().weight.device
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with paged(configs_of(model), recording):
        model(input_ids=one, position_ids=one, use_cache=False)
    if not recording.calls:
        raise ValueError(f"model: {type(model).__name__} does not attend through transformers' AttentionInterface")
    return recording.calls


def configs_of(model: PreTrainedModel) -> list:
    """Every config object in the model: each layer looks up its attention by the one that it holds."""
    found = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    return list(found.values())


def _refuse_stateful(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if getattr(model, "_is_stateful", False) or kinds:
        kind = ", ".join(sorted(kinds)) or "recurrent"
        raise ValueError(
            f"model: {name} has {kind} layers, whose state can't be rolled back by truncating a block table"
        )
    if not model._can_set_attn_implementation():
        raise ValueError(f"model: {name} does not attend through transformers' AttentionInterface ({NAME})")
