"""AttentionPlan: what all attention layers of one forward share, made on the first layer that needs it.

On a GPU that is the table of work that a device kernel fills from the lengths (no copy to the host, so that a CUDA graph
can hold it) and the workspace of split sequences; on a CPU gather indices and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from specdec.kernels.check import INTS, check

T = TypeVar("T")


class AttentionPlan:
    """Lengths and block tables of one forward. Made by `plan_attention`; good until one of its tensors changes."""

    def __init__(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        split_size: int | None = None,
    ):
        self.block_table = block_table
        self.seq_lens = seq_lens
        self.cu_seqlens_q = cu_seqlens_q
        self.max_seqlen_q = max_seqlen_q
        self.split_size = split_size
        self._shared: dict[Hashable, Any] = {}

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """The one `make()` of this plan for `key`; layers that are alike have equal keys."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def covers(self, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor) -> bool:
        """Whether these are the tensors that the plan was made of, by address: wrappers may hand on fresh views."""
        return (
            self.seq_lens.data_ptr() == seq_lens.data_ptr()
            and self.block_table.data_ptr() == block_table.data_ptr()
            and self.cu_seqlens_q.data_ptr() == cu_seqlens_q.data_ptr()
        )


def plan_attention(
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    split_size: int | None = None,
) -> AttentionPlan:
    """Plan one forward of R sequences for all its layers, whatever their heads, head dims and windows are.

    block_table [R, M] int32, seq_lens [R] int32 (the new tokens included), cu_seqlens_q [R + 1] int32, and
    `max_seqlen_q`, an upper bound of the new tokens of a sequence. Launches nothing by itself: the first layer of each
    kind does, so inside a CUDA graph make the plan within the capture, and every replay then plans anew on the device.
    `split_size` turns on the invariant mode: KV is cut at multiples of so many positions, and a sequence's output bits
    don't depend on the batch or on how many of its tokens are new. Raises ValueError for bad tensors.
    """
    rows = seq_lens.shape[0] if seq_lens.ndim else 0
    check("block_table", block_table, (rows, None), INTS[:1], seq_lens.device, unit_stride=True)
    check("seq_lens", seq_lens, (rows,), INTS[:1], unit_stride=True)
    check("cu_seqlens_q", cu_seqlens_q, (rows + 1,), INTS[:1], seq_lens.device, unit_stride=True)
    if max_seqlen_q < 0:
        raise ValueError(f"max_seqlen_q: expected at least 0, got {max_seqlen_q}")
    if split_size is not None and (split_size < 128 or split_size % 128):
        raise ValueError(f"split_size: expected None or a multiple of 128 positions, got {split_size}")
    return AttentionPlan(block_table, seq_lens, cu_seqlens_q, max_seqlen_q, split_size)
