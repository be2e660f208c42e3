"""HookedRoute: a model whose attention is a function of ours, through transformers' AttentionInterface.

The kernel reads blocks in place, tokens of all sequences are packed into one row, and rounds can be CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.kernels import plan_attention
from specdec.kvpool import KVSpec
from specdec.model.attention import NAME, CallKV, LayerKV, Recording, Step, paged, window_of
from specdec.model.packed import Packed
from specdec.model.placement import device_of
from specdec.model.rotary import held, rotary_of


class HookedRoute:
    """`record` once, `attach` KV tensors, then `run`.

    Raises ValueError for a class that doesn't attend through AttentionInterface.
    """

    name = "paged"
    capturable = True

    def __init__(self, model: PreTrainedModel):
        if not model._can_set_attn_implementation():
            raise ValueError(f"{type(model).__name__} does not attend through transformers' AttentionInterface")
        self.model, self.configs, self.rotary = model, configs_of(model), rotary_of(model)
        self._modules: list[nn.Module] = []

    def record(self) -> list[KVSpec]:
        """Run one token, noting what each attention call of a forward stores; in the order of the calls."""
        recording, device = Recording(), device_of(self.model)
        one = torch.zeros(1, 1, dtype=torch.int64, device=device)
        with paged(self.configs, recording), held(self.rotary):
            self.model(input_ids=one, position_ids=one, use_cache=False)
        if not recording.calls:
            raise ValueError(f"{type(self.model).__name__} made no attention call through AttentionInterface")
        self._modules = [module for module, _ in recording.calls]
        return [spec for _, spec in recording.calls]

    def attach(self, caches: list[CallKV]) -> None:
        """Give the recorded calls their KV tensors."""
        layers: dict[nn.Module, LayerKV] = {}
        for module, cache in zip(self._modules, caches, strict=True):
            layers.setdefault(module, LayerKV([], window_of(module))).caches.append(cache)
        for module, layer in layers.items():
            module.specdec_kv = layer  # type: ignore[assignment]

    def detach(self) -> None:
        for module in set(self._modules):
            del module.specdec_kv

    def run(self, packed: Packed, logits: bool, compiled: bool = False) -> Tensor | None:
        """[N, vocab] logits of every token, or nothing. compiled: layers may run their compiled code."""
        step = Step(
            packed.slot_mapping,
            packed.block_table,
            packed.seq_lens,
            packed.cu_seqlens_q,
            packed.max_seqlen_q,
            plan_attention(packed.block_table, packed.seq_lens, packed.cu_seqlens_q, packed.max_seqlen_q),
            compiled=compiled,
        )
        arguments: dict[str, Any] = {"input_ids": packed.token_ids[None], "position_ids": packed.positions[None]}
        out = None
        with paged(self.configs, step), held(self.rotary):
            if logits:
                out = self.model(**arguments, use_cache=False).logits[0]
            else:
                self.model.base_model(**arguments, use_cache=False)
        if step.calls != len(self._modules):
            raise RuntimeError(
                f"{type(self.model).__name__}: expected {len(self._modules)} paged attention calls in a forward, got "
                f"{step.calls}; did something else set the model's attention implementation ({NAME})?"
            )
        return out


def configs_of(model: PreTrainedModel) -> list:
    """Every config object in the model: each layer looks up its attention by the one that it holds."""
    found = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    return list(found.values())
