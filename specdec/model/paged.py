"""PagedModel: a Hugging Face causal LM with one verb, extend: run the tokens past what is cached.

Prompts, prompt chunks, plain decoding, verification and draft steps are `extend` with other lengths. It knows tensors;
sequences, rounds and blocks are the business of others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Literal, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.advice import advise
from specdec.kvpool import KVPool, KVSpec
from specdec.model.adapters import active_adapters
from specdec.model.attention import CallKV, take_turns
from specdec.model.fusion import Fused, LinearWatch, fuse_linears
from specdec.model.hooked import HookedRoute
from specdec.model.layers import CompiledLayers, decoder_layers
from specdec.model.packed import Packed
from specdec.model.placement import device_of, is_spread
from specdec.model.probe import Route, route_of
from specdec.model.products import Product
from specdec.model.scales import KVScales, stored_as
from specdec.model.taps import Taps

_in_use: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


class PagedModel:
    """`model` with its KV in `pool`, under `name`. The model object stays as it was outside of `extend`.

    fuse: run products that share an input as one (fusion.py); compiled: compile its layers (layers.py);
    scales: keep KV in fp8, multiplied by these; None keeps it in the model's dtype.
    Raises ValueError for a model that paging can't serve, with the reason (probe.py).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KVPool,
        name: str,
        *,
        fuse: bool = True,
        compiled: bool = False,
        scales: KVScales | None = None,
    ):
        refuse_in_use(model)
        self.model, self.pool, self.name = model, pool, name
        self.device = device_of(model)
        self.route = route_of(model)
        with LinearWatch(model) as watch:
            specs = record(self.route)
        each = [(None, None)] * len(specs) if scales is None else scales.on(specs)
        fused = fuse_linears(watch.groups()) if fuse else []
        self.products: list[Fused | Product] = [*fused, *self._others(watch, fused)]
        self.slow = self._slow()
        self.layers = CompiledLayers(model) if compiled and not self.slow else None
        self._taps: list[Taps] = []
        self._turns = take_turns(model.base_model)
        if self.layers:
            self.layers.attach()
        weight = model.get_input_embeddings().weight
        self._kind, self._captured = (weight.dtype, weight.device), self._capturable()
        kv = pool.add_model(name, stored_as(specs, "fp8" if scales else "auto"))
        self.route.attach([CallKV(*pair, *scale) for pair, scale in zip(kv, each, strict=True)])
        _in_use.add(model.base_model)

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding: ids past it must not reach the model."""
        return self.model.get_input_embeddings().weight.shape[0]

    @overload
    def extend(self, packed: Packed, *, logits: Literal[True] = True, prompt: bool = False) -> Tensor: ...
    @overload
    def extend(self, packed: Packed, *, logits: Literal[False]) -> None: ...
    @torch.inference_mode()
    def extend(self, packed: Packed, *, logits: bool = True, prompt: bool = False) -> Tensor | None:
        """Run the packed tokens, writing their KV; [N, vocab] logits of every token, or nothing with `logits=False`.

        Only forwards with logits use compiled layers, but those of a `prompt`: their numbers of tokens are not few.
        Where the tokens are on another device than the model, they go there and the logits come back.
        """
        out = self.route.run(packed.to(self.device), logits, compiled=logits and not prompt)
        return None if out is None else out.to(packed.token_ids.device)

    def tap(self, layers: Iterable[int]) -> Taps:
        """Note the hidden states after decoder layers `layers` in every later `extend`, until the taps are closed.

        Tap before the first round where rounds are CUDA graphs: a graph holds what was there when it was captured.
        Raises ValueError for a number that is no layer's, and for a model whose forwards are not packed.
        """
        if not isinstance(self.route, HookedRoute):
            raise ValueError(f"layers: {type(self.model).__name__} runs {self.route.name}, its states can't be tapped")
        taps = Taps(decoder_layers(self.model), layers)
        self._taps.append(taps)
        return taps

    def refresh(self) -> bool:
        """Whether weights have been replaced by other tensors, or other adapters made active, since the last call.

        Fused copies take new weights in.

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
        before, self._captured = self._captured, self._capturable()
        return self._captured != before

    def close(self) -> None:
        """Give the KV back; the model object keeps no trace."""
        for taps in self._taps:
            taps.close()
        for hook in self._turns:
            hook.remove()
        self.route.detach()
        _in_use.discard(self.model.base_model)
        if self.layers:
            self.layers.detach()
        for product in self.products:
            product.detach()
        self.pool.remove_model(self.name)

    def _capturable(self) -> tuple[list[int], list[tuple]]:
        """What a captured graph holds on to: the addresses of weights, and the adapters that were active."""
        return [w.data_ptr() for w in self.model.parameters()], active_adapters(self.model)

    def _slow(self) -> str | None:
        """Why forwards can't be compiled or be part of a CUDA graph, None if they can; said once, as a warning."""
        why = None
        if not self.route.capturable:
            why = f"{type(self.model).__name__} runs {self.route.name}: each layer copies its KV out of the blocks"
        elif is_spread(self.model):
            why = f"the weights of {type(self.model).__name__} are not all on one device"
        if why:
            advise(f"model: {why}; slower, and without CUDA graphs (docs/models.md)")
        return why

    def _others(self, watch: LinearWatch, fused: list[Fused]) -> list[Product]:
        """The linear modules that were not fused: their products are ours too."""
        done = {linear for group in fused for linear in group.linears}
        products = [Product(linear) for linear in watch.linears() if linear not in done]
        for product in products:
            product.attach()
        return products


def refuse_in_use(model: PreTrainedModel) -> None:
    """Raises ValueError for a model object that has its KV in a pool already, or layers that have."""
    if model.base_model in _in_use:
        raise ValueError(f"model: this {type(model).__name__} object is in use by another LLM; close that one first")
    # A deep copy of a model in use has the attribute too, and no part in its KV.
    holding = {module for other in _in_use for module in other.modules() if hasattr(module, "specdec_kv")}
    if not holding.isdisjoint(model.modules()):
        raise ValueError(
            f"model: this {type(model).__name__} shares layers with a model in use, whose KV is in them; pass a deep copy"
        )


def kv_specs(model: PreTrainedModel, kv_dtype: str | torch.dtype = "auto", name: str = "kv_dtype") -> list[KVSpec]:
    """The KV tensors that `model` needs, one per attention call of a forward; to size a pool before making it.

    kv_dtype, name: what KV is kept in, and by whose wish; see `stored_as`, which may raise ValueError.
    Raises ValueError for a model that paging can't serve, with the reason.
    """
    return stored_as(record(route_of(model)), kv_dtype, name)


@torch.inference_mode()
def record(route: Route) -> list[KVSpec]:
    """What a forward stores; see the routes."""
    return route.record()
