"""GatheredRoute: a model with attention of its own, over the same blocks: a `Cache` that stores into them and gathers.

For what AttentionInterface doesn't reach (ALiBi, biases, masks of a model's own). Slow: every layer copies the whole
context, padded to the longest sequence; no graphs, since its shapes follow the lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from specdec.kernels import store_kv
from specdec.kvpool import KVSpec
from specdec.model.attention import CallKV, Recording, paged
from specdec.model.packed import Packed
from specdec.model.placement import device_of
from specdec.model.rotary import held, rotary_of


@dataclass(slots=True)
class Group:
    """B sequences of a packed forward, their last Q tokens and K positions, padded at the left.

    tokens [B, Q] places in the packed tokens and slots [B, K] of the pool, -1 for padding; the newest are the last.
    """

    tokens: Tensor
    slots: Tensor


class GatheredRoute:
    """`record` once, `attach` KV tensors, then `run`.

    together: sequences of any lengths in one padded batch, which takes a model that heeds `position_ids` or looks at the
    mask. Otherwise only sequences of equal lengths share a forward, and nothing is padded.
    """

    capturable = False

    def __init__(self, model: PreTrainedModel, together: bool):
        self.model, self.together, self.rotary = model, together, rotary_of(model)
        self.name = "gathered" if together else "gathered apart"
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        names = [name for name in ("cache", "past_key_values") if name in parameters]
        if not names:
            raise ValueError(f"{type(model).__name__} takes no cache")
        self._cache_name = names[0]
        if together and not (self._takes_positions or "attention_mask" in parameters):
            raise ValueError(f"{type(model).__name__} can't be told positions")
        self._caches: list[CallKV] = []
        self._none = torch.empty(0, 0)

    def record(self) -> list[KVSpec]:
        """Run one token, noting what each update of the cache stores; in the order of the updates."""
        one = torch.zeros(1, 1, dtype=torch.int64, device=device_of(self.model))
        cache = BlockCache(Group(one, one), one[0], [])
        with paged([], Recording()), held(self.rotary):
            scores = self._forward(cache, one, one, True)
        if not cache.specs:
            raise ValueError(f"{type(self.model).__name__} stores nothing in transformers' cache")
        self._none = cast(Tensor, scores)[0, :0]
        return cache.specs

    def attach(self, caches: list[CallKV]) -> None:
        """Give the recorded updates their KV tensors."""
        self._caches = caches

    def detach(self) -> None:
        self._caches = []

    def run(self, packed: Packed, logits: bool, compiled: bool = False) -> Tensor | None:
        """[N, vocab] logits of every token, or nothing. Reads lengths back to the host."""
        out = self._none.new_zeros(len(packed.token_ids), self._none.shape[1]) if logits else None
        block_size = self._caches[0].k.shape[1]
        for group in groups_of(packed, block_size, self.together):
            cache = BlockCache(group, packed.slot_mapping, self._caches)
            real = group.tokens >= 0
            ids = torch.where(real, packed.token_ids[group.tokens], 0)
            positions = torch.where(real, packed.positions[group.tokens], 0)
            with paged([], cache), held(self.rotary):
                scores = self._forward(cache, ids, positions, logits)
            if cache.updates != len(self._caches):
                raise RuntimeError(
                    f"{type(self.model).__name__}: expected {len(self._caches)} updates of the cache in a forward, got "
                    f"{cache.updates}"
                )
            if out is not None and scores is not None:
                out[group.tokens[real].to(out.device)] = scores[real.to(scores.device)]
        return out

    def _forward(self, cache: BlockCache, ids: Tensor, positions: Tensor, logits: bool) -> Tensor | None:
        arguments: dict[str, Any] = {"input_ids": ids, self._cache_name: cache, "use_cache": True}
        if self.together:  # else a model counts on from the cache's length, some of them from another number than 0
            arguments["attention_mask"] = (cache.group.slots >= 0).long()
            if self._takes_positions:
                arguments["position_ids"] = positions
        if logits:
            return self.model(**arguments).logits
        self.model.base_model(**arguments)
        return None


def groups_of(packed: Packed, block_size: int, together: bool) -> Iterator[Group]:
    """The sequences of `packed` that have tokens: all in one group, or one group for each (past, new) length."""
    ends, lens = packed.cu_seqlens_q.tolist(), packed.seq_lens.tolist()
    # A drafter's masked tokens stand before position 0.
    starts = [max(start, end - length) for start, end, length in zip(ends[:-1], ends[1:], lens, strict=True)]
    found: dict[Any, list[int]] = {}
    for row, (start, end) in enumerate(zip(starts, ends[1:], strict=True)):
        if end > start:
            found.setdefault(None if together else (lens[row], end - start), []).append(row)
    for rows in found.values():
        new, most = max(ends[row + 1] - starts[row] for row in rows), max(lens[row] for row in rows)
        tokens, order = torch.full((len(rows), new), -1), torch.full((len(rows), most), -1)
        for i, row in enumerate(rows):
            tokens[i, new - ends[row + 1] + starts[row] :] = torch.arange(starts[row], ends[row + 1])
            order[i, most - lens[row] :] = torch.arange(lens[row])
        order = order.to(packed.block_table.device)
        blocks = packed.block_table[rows].gather(1, order.clamp(min=0) // block_size).long()
        slots = torch.where((order >= 0) & (blocks >= 0), blocks * block_size + order % block_size, -1)
        yield Group(tokens.to(packed.token_ids.device), slots)


class BlockCache(Cache):
    """transformers' cache for one forward of a group: stores new KV into blocks, and hands out all of a sequence's.

    slot_mapping [N]: where the packed tokens' KV goes. caches: one per update, in their order; empty to record.
    """

    def __init__(self, group: Group, slot_mapping: Tensor, caches: list[CallKV]):
        self.layers: list[Any] = []
        self.layer_class_to_replicate, self.offloading = None, False
        self.group, self.caches = group, caches
        self.write = torch.where(group.tokens >= 0, slot_mapping[group.tokens], -1).flatten()
        self.specs: list[KVSpec] = []
        self.updates = 0

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """k [B, Hkv, Q, D], v [B, Hkv, Q, Dv] of the new tokens; returns those of all K positions."""
        call, self.updates = self.updates, self.updates + 1
        if not self.caches:
            self.specs.append(KVSpec(f"{call}:{layer_idx}", k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device))
            return k, v
        kv = self.caches[call]
        store_kv(_flat(k), _flat(v), kv.k, kv.v, self.write.to(k.device), k_scale=kv.k_scale, v_scale=kv.v_scale)
        return self._gather(kv.k, kv.k_scale, k.dtype), self._gather(kv.v, kv.v_scale, v.dtype)

    def _gather(self, cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[B, Hkv, K, D] of `dtype`: zeros where there is no token, for a weight of 0 makes no NaN harmless."""
        slots = self.group.slots.to(cache.device)
        flat = cache.flatten(0, 1)
        bytes_ = flat.view(torch.uint8) if flat.element_size() == 1 else flat  # 1-byte floats can't be gathered
        found = bytes_[slots.clamp(min=0)].view(flat.dtype).to(dtype)
        if scale is not None:
            found = found * scale[:, None].to(dtype)
        return found.where((slots >= 0)[..., None, None], 0).transpose(1, 2).contiguous()

    @property
    def _past(self) -> int:
        return self.group.slots.shape[1] - self.group.tokens.shape[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.group.slots.shape[1], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    is_compileable = False
    is_initialized = True


def _flat(x: Tensor) -> Tensor:
    """[B, H, Q, D] as [B * Q, H, D], one token after another."""
    return x.transpose(1, 2).flatten(0, 1)
