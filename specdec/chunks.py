"""Chunks of prompts, laid out as a forward takes them. On the host, sent to the device without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.round import slots
from specdec.model import Packed
from specdec.scheduler import Chunk

_TOKENS = tuple(sorted({16, *(1 << i for i in range(5, 31)), *(3 << i for i in range(6, 29))}))
"""Token buckets: 16, 32, 64, 128, 192, 256, 384, 512, 768, ...: of a few hundred tokens at most a third is padding."""
_LEAST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Room for `tokens` tokens of `rows` sequences with `blocks` blocks each."""

    tokens: int
    rows: int
    blocks: int

    @classmethod
    def exact(cls, chunks: list[Chunk]) -> ChunkShape:
        """No more room than `chunks` take."""
        return cls(sum(c.end - c.start for c in chunks), len(chunks), max(len(c.seq.table.blocks) for c in chunks))

    @classmethod
    def bucket(cls, chunks: list[Chunk]) -> ChunkShape:
        """Room for `chunks` in one of few shapes."""
        need = cls.exact(chunks)
        rows = 1 << 2 * (((need.rows - 1).bit_length() + 1) // 2)
        blocks = max(_LEAST_BLOCKS, 1 << (need.blocks - 1).bit_length())
        return cls(next(n for n in _TOKENS if n >= need.tokens), rows, blocks)


class Layout(NamedTuple):
    """What a forward over chunks reads, in two tensors so that two copies bring it to the device.

    tokens [3, N] int64: ids, positions, rows, the latter -1 for padding; table [R, M + 2] int32: a sequence's blocks
    padded with -1, its length with the chunk, and where its tokens end among the packed ones.
    """

    tokens: Tensor
    table: Tensor


def lay_out(chunks: list[Chunk], shape: ChunkShape, vocab_size: int) -> Layout:
    """The tokens of `chunks`, ragged, one after another. Ids from `vocab_size` on, which have no embedding, become 0."""
    used = sum(c.end - c.start for c in chunks)
    pad = [0] * (shape.tokens - used)
    tokens = torch.tensor(
        [
            [t if t < vocab_size else 0 for c in chunks for t in c.seq.token_ids[c.start : c.end]] + pad,
            [p for c in chunks for p in range(c.start, c.end)] + pad,
            [i for i, c in enumerate(chunks) for _ in range(c.start, c.end)] + [-1] * len(pad),
        ]
    )
    table = torch.full((shape.rows, shape.blocks + 2), -1, dtype=torch.int32)
    table[:, shape.blocks], table[:, shape.blocks + 1] = 0, used
    ends = 0
    for i, chunk in enumerate(chunks):
        ends += chunk.end - chunk.start
        blocks = chunk.seq.table.blocks
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        table[i, shape.blocks], table[i, shape.blocks + 1] = chunk.end, ends
    return Layout(tokens, table)


def packed(layout: Layout, block_size: int, max_seqlen_q: int) -> Packed:
    """The forward's input, on the device of `layout`."""
    ids, positions, row = layout.tokens
    block_table = layout.table[:, :-2]
    return Packed(
        token_ids=ids,
        positions=positions,
        slot_mapping=slots(block_table, row.clamp(min=0), positions, row >= 0, block_size),
        block_table=block_table,
        seq_lens=layout.table[:, -2].contiguous(),
        cu_seqlens_q=torch.nn.functional.pad(layout.table[:, -1], (1, 0)),
        max_seqlen_q=max_seqlen_q,
    )
