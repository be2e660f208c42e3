"""How much fits: tokens per sequence, rows, blocks of KV. Chosen from the models and the memory of the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdec.kvpool import KVPool, KVSpec

CPU_ROWS, CUDA_ROWS = 16, 256
_CPU_BYTES = 1 << 30
_CUDA_SHARE = 0.85
"""Of the device memory that is free once the weights are there; the rest is for activations, logits and graphs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len: tokens per sequence; max_rows: sequences that run at once; num_blocks of block_size slots."""

    max_model_len: int
    max_rows: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for, `None` where the choice is ours. kv_memory in bytes."""

    max_model_len: int | None = None
    max_rows: int | None = None
    kv_memory: int | None = None
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_rows", "kv_memory", "block_size"):
            value = getattr(self, name)
            if value is None and name != "block_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")


def choose(models: list[PreTrainedModel], specs: Sequence[KVSpec], wishes: Wishes) -> Limits:
    """Limits for `models` on one pool. Raises ValueError if a wish is more than a model or the memory allows."""
    positions = max_positions(models[0])
    if wishes.max_model_len and positions and wishes.max_model_len > positions:
        raise ValueError(
            f"max_model_len: expected at most {positions}, the model's positions, got {wishes.max_model_len}"
        )
    length = wishes.max_model_len or positions or 4096
    device = torch.device(specs[0].device)
    rows = wishes.max_rows or (CPU_ROWS if device.type == "cpu" else CUDA_ROWS)
    blocks = min(_blocks(specs, wishes), rows * -(-length // wishes.block_size))
    return Limits(length, rows, blocks, wishes.block_size)


def max_positions(model: PreTrainedModel) -> int | None:
    """The positions that a model's config allows, None where it names none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _blocks(specs: Sequence[KVSpec], wishes: Wishes) -> int:
    """Blocks that the wished memory holds, else the free memory of each device that layers are on."""
    if wishes.kv_memory:
        shares = [(specs, wishes.kv_memory)]
    else:
        devices = {torch.device(spec.device) for spec in specs}
        shares = [([s for s in specs if torch.device(s.device) == device], _free_bytes(device)) for device in devices]
    sizes = [(KVPool.bytes_per_block_of(part, wishes.block_size), memory) for part, memory in shares]
    for size, memory in sizes:
        if memory < size:
            raise ValueError(f"kv_memory: expected at least {size} bytes, one block of KV, got {memory}")
    return min(memory // size for size, memory in sizes)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_CPU_BYTES, free // 2)
