"""How much fits: tokens per sequence, rows, blocks of KV. Chosen from the models and the memory of the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.adjustments import table_bytes
from specdec.advice import advise
from specdec.kvpool import KVPool, KVSpec
from specdec.shown import shown

CPU_ROWS, CUDA_ROWS = 16, 256
_CPU_BYTES = 1 << 30
_CUDA_SHARE = 0.85
"""Of the device memory that is free once the weights are there, at most."""
GRAPHS, _GRAPH_BYTES = 32, 16 << 20
"""Captured at once, and what the nodes of one take: some 1,600 kernels of 10 KB."""
_PADDED_POSITIONS = 2
"""Rows that some models, as OPT, have in front of those of their positions."""
_WORKSPACES = 8 * (32 << 20)
"""What the libraries of matrix products keep for each stream that they have met: rounds', captures' and graphs' own."""


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
                raise TypeError(f"{name}: expected an int, got {type(value).__name__} {shown(value)}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Work:
    """What a step runs at most beside KV: `drafts` per row of a round, or `prompt_budget` prompt tokens.

    graphs: rounds are captured. Graphs share one pool of memory, beside that of what runs step by step: prompts, and the
    rounds before each capture.
    """

    drafts: int
    prompt_budget: int
    graphs: bool = True

    def num_bytes(self, model: PreTrainedModel, rows: int) -> int:
        """Memory that it takes on a GPU, in bytes, estimated from shapes.

        T = rows * (1 + drafts, rounded up to a power of two) tokens are the largest bucket of a round. Logits [T, vocab] in the
        model's dtype, once in fp32, where they are adjusted, and as much again: a round without graphs was seen to need more
        than these two copies, and what holds the rest is not known. Activations of one layer of max(T, prompt_budget)
        tokens: eight tensors as wide as the hidden state and three as wide as the MLP. All of that once more in the pool
        of the graphs. And what stays: tables of what rows want done to their logits, workspaces, and the nodes of GRAPHS
        graphs.
        """
        config = model.config.get_text_config()
        drafts = 1 << (self.drafts - 1).bit_length() if self.drafts else 0
        tokens, size = rows * (1 + drafts), model.dtype.itemsize
        logits = tokens * config.vocab_size * (size + 8)
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        inner = max(inner) if isinstance(inner, (list, tuple)) else inner  # some have one for every layer
        activations = max(tokens, self.prompt_budget) * (8 * config.hidden_size + 3 * inner) * size
        stays = table_bytes(rows + 1, config.vocab_size) + _WORKSPACES + self.graphs * GRAPHS * _GRAPH_BYTES
        return (logits + activations) * (1 + self.graphs) + stays


def choose(models: list[PreTrainedModel], specs: Sequence[KVSpec], wishes: Wishes, work: Work | None = None) -> Limits:
    """Limits for `models` on one pool. Raises ValueError if a wish is more than a model or the memory allows.

    work: what the memory beside the pool must hold; without it a share of it is left.
    """
    each = [max_positions(models[0]), *map(learned_positions, models[1:])]
    positions = min(filter(None, each), default=None)
    if wishes.max_model_len and positions and wishes.max_model_len > positions:
        raise ValueError(
            f"max_model_len: expected at most {positions}, the model's positions, got {shown(wishes.max_model_len)}"
        )
    if positions != each[0] and not wishes.max_model_len:
        advise(f"max_model_len: {positions}, as many positions as the draft model has learned")
    length = wishes.max_model_len or positions or 4096
    device = torch.device(specs[0].device)
    rows = wishes.max_rows or (CPU_ROWS if device.type == "cpu" else CUDA_ROWS)
    beside = max((work.num_bytes(model, rows) for model in models), default=0) if work else 0
    blocks = min(_blocks(specs, wishes, beside), rows * -(-length // wishes.block_size))
    return Limits(length, rows, blocks, wishes.block_size)


def max_positions(model: PreTrainedModel) -> int | None:
    """The positions that a model's config allows, None where it names none.

    Those of a short text where angles follow the length of the text (longrope): a forward has one set of angles for all
    its rows, so a long one would change what its neighbours say, and cached keys would have the angles of another length.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and kind.get("rope_type") == "longrope"]
    short = [kind.get("original_max_position_embeddings") for kind in kinds]
    return min([n for n in (positions, *short) if n], default=None)


def learned_positions(model: PreTrainedModel) -> int | None:
    """The positions of a model that has an embedding for each of them, as GPT-2: past them it has no forward at all.

    None for rotary and other positions, past which a draft model drafts worse, and that is all.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    others = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings())
    if any(positions and positions <= m.num_embeddings <= positions + _PADDED_POSITIONS for m in others):
        return positions
    return None


def _blocks(specs: Sequence[KVSpec], wishes: Wishes, beside: int) -> int:
    """Blocks that the wished memory holds, else the free memory of each device that layers are on, less `beside`."""
    if wishes.kv_memory:
        shares = [(specs, wishes.kv_memory)]
    else:
        devices = {torch.device(spec.device) for spec in specs}
        shares = [
            ([s for s in specs if torch.device(s.device) == device], _kv_bytes(device, beside)) for device in devices
        ]
    sizes = [(KVPool.bytes_per_block_of(part, wishes.block_size), memory) for part, memory in shares]
    for size, memory in sizes:
        if memory < size:
            raise ValueError(f"kv_memory: expected at least {size} bytes, one block of KV, got {memory}")
    return min(memory // size for size, memory in sizes)


def _kv_bytes(device: torch.device, beside: int) -> int:
    """Bytes for KV on `device`, where `beside` bytes are needed for other things."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return share(free, beside)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_CPU_BYTES, free // 2)


def share(free: int, beside: int) -> int:
    """Of `free` bytes of a GPU those for KV: all but what is needed beside it, and at most a fixed share."""
    return max(0, min(int(free * _CUDA_SHARE), free - beside))
