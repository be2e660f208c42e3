"""Chunks of prompts, laid out as a forward takes them. On the host, sent to the device without waiting for it."""

from __future__ import annotations

import torch

from specdec.kernels.round import slots
from specdec.model import Packed, PagedModel
from specdec.rows import upload
from specdec.scheduler import Chunk


def pack_chunks(chunks: list[Chunk], model: PagedModel, device: torch.device) -> Packed:
    """The tokens of `chunks`, ragged, one after another. Ids that `model` has no embedding for become 0."""
    lengths = [c.end - c.start for c in chunks]
    ids = [t if t < model.vocab_size else 0 for c in chunks for t in c.seq.token_ids[c.start : c.end]]
    host = torch.tensor(
        [
            ids,
            [p for c in chunks for p in range(c.start, c.end)],
            [i for i, n in enumerate(lengths) for _ in range(n)],
        ]
    )
    ids, positions, row = upload(host, device).to(device, non_blocking=True)
    width = max(len(c.seq.table.blocks) for c in chunks)
    host = torch.full((len(chunks), width + 2), -1, dtype=torch.int32)
    ends = 0
    for i, chunk in enumerate(chunks):
        ends += lengths[i]
        blocks = chunk.seq.table.blocks
        host[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        host[i, width], host[i, width + 1] = chunk.end, ends
    table = upload(host, device).to(device, non_blocking=True)
    block_table = table[:, :width]
    return Packed(
        token_ids=ids,
        positions=positions,
        slot_mapping=slots(block_table, row, positions, torch.ones_like(row, dtype=torch.bool), model.pool.block_size),
        block_table=block_table,
        seq_lens=table[:, width].contiguous(),
        cu_seqlens_q=torch.nn.functional.pad(table[:, width + 1], (1, 0)),
        max_seqlen_q=max(lengths),
    )
