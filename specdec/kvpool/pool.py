"""The KV tensors of every model that shares one space of block ids.

A block holds the KV of the same positions for the target and for its drafter, in tensors of their own shapes, so one
truncation rolls both back and one prefix hit serves both.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kvpool.blocks import BlockAllocator
from specdec.kvpool.layout import to_device
from specdec.kvpool.table import BlockTable


@dataclass(frozen=True)
class KVSpec:
    """What one attention layer stores per token. `key` names the layer, uniquely within its model.

    Raises ValueError if a size is below 1 or the dtype is not floating (poison and attention both need that).
    """

    key: str | tuple[object, ...]
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device | str

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)} (layer {self.key!r})")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point dtype, got {self.dtype} (layer {self.key!r})")


class KVPool:
    """`num_blocks` blocks of `block_size` token slots, and the tensors behind them, per model and layer."""

    def __init__(self, num_blocks: int, block_size: int, *, poison: bool = False):
        """Args: poison, fill new KV tensors with NaN instead of 0, so that a read of an unwritten slot shows.

        Raises ValueError if num_blocks or block_size is below 1.
        """
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {block_size}")
        self.allocator = BlockAllocator(num_blocks)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.poison = poison
        self._specs: dict[str, tuple[KVSpec, ...]] = {}
        self._kv: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add_model(self, name: str, specs: Sequence[KVSpec]) -> list[tuple[Tensor, Tensor]]:
        """Allocate the KV tensors of a model.

        Returns: per spec, in order, k [num_blocks, block_size, num_kv_heads, head_dim] and
        v [num_blocks, block_size, num_kv_heads, v_head_dim], contiguous, on the spec's device.
        Raises: ValueError if the name is taken, `specs` is empty, or two specs have the same key; what torch raises if
        memory is short, and then the pool is unchanged.
        """
        if name in self._kv:
            raise ValueError(f"name: expected a model not in the pool, got {name!r}")
        keys = [spec.key for spec in specs]
        if not keys or len(set(keys)) < len(keys):
            raise ValueError(f"specs: expected at least one layer, with distinct keys, got {keys}")
        # A caller's inference mode must not make tensors that nobody may write to outside of it.
        with torch.inference_mode(False):
            kv = [(self._new(spec, spec.head_dim), self._new(spec, spec.v_head_dim)) for spec in specs]
        self._specs[name], self._kv[name] = tuple(specs), kv
        return list(kv)

    def _new(self, spec: KVSpec, dim: int) -> Tensor:
        # One storage per tensor: views of a common one would be aliased, mutated inputs to a compiled layer.
        # Zeros, not empty: foreign kernels may multiply what lies past a sequence's end by a zero weight.
        shape = (self.num_blocks, self.block_size, spec.num_kv_heads, dim)
        tensor = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        return tensor.fill_(float("nan")) if self.poison else tensor

    def kv(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """The (k, v) pairs of a model, as `add_model` returned them. Raises ValueError if the model is unknown."""
        self._require_model(name)
        return list(self._kv[name])

    def remove_model(self, name: str) -> None:
        """Drop a model's tensors; no block is complete for it any more. Raises ValueError if the model is unknown.

        Prefixes stay published, for the other models. If it was the last one, they are forgotten.
        """
        self._require_model(name)
        del self._specs[name], self._kv[name]
        self.allocator.forget_model(name)
        if not self._kv:
            self.allocator.reset_prefix_cache()

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of all models, on all devices."""
        return sum(self.bytes_per_block_of(specs, self.block_size) for specs in self._specs.values())

    @staticmethod
    def bytes_per_block_of(specs: Sequence[KVSpec], block_size: int) -> int:
        """Bytes of one block of `block_size` slots over these layers; to budget one device, pass its layers only."""
        per_token = (s.num_kv_heads * (s.head_dim + s.v_head_dim) * s.dtype.itemsize for s in specs)
        return block_size * sum(per_token)

    def new_table(self) -> BlockTable:
        """An empty block table over this pool."""
        return BlockTable(self.allocator, self.block_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, source to destination, in all layers of all models, as if one pair after the other.

        Enqueued on each device's current stream without waiting. Ownership and completeness stay as they are.
        Raises: ValueError if a block is out of range.
        """
        origin: dict[int, int] = {}  # destination -> the block whose present content ends up there
        for source, destination in pairs:
            self._require_block(source)
            self._require_block(destination)
            origin[destination] = origin.get(source, source)
        if not origin:
            return
        indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for tensor in (t for kv in self._kv.values() for pair in kv for t in pair):
            if tensor.device not in indices:
                sources, destinations = array("q", origin.values()), array("q", origin)
                indices[tensor.device] = to_device(sources, tensor.device), to_device(destinations, tensor.device)
            _copy_rows(tensor, *indices[tensor.device])

    def _require_model(self, name: str) -> None:
        if name not in self._kv:
            raise ValueError(f"name: expected one of {sorted(self._kv)}, got {name!r}")

    def _require_block(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"pairs: expected blocks 0..{self.num_blocks - 1}, got {block}")


def _copy_rows(tensor: Tensor, sources: Tensor, destinations: Tensor) -> None:
    # All sources are read before any destination is written. Bytes, for one-byte floats lack the indexing kernels.
    rows = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    rows.index_copy_(0, destinations, rows.index_select(0, sources))
