"""Packed: the tokens that a forward runs, and where their keys and values are."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.columns import DraftStep, PackedTokens


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

    @classmethod
    def of(cls, laid: PackedTokens | DraftStep, block_table: Tensor, max_seqlen_q: int) -> Packed:
        """What a round's kernels have laid out, with the tables of its rows."""
        return cls(
            token_ids=laid.token_ids,
            positions=laid.positions,
            slot_mapping=laid.slot_mapping,
            block_table=block_table,
            seq_lens=laid.seq_lens,
            cu_seqlens_q=laid.cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
        )

    def to(self, device: torch.device) -> Packed:
        """The same on `device`; itself if it is there."""
        if self.token_ids.device == device:
            return self
        tensors: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)
