"""The running rows on the device: what a round reads and what it changes. Knows tensors and row numbers, no scheduling.

The host owns the block table and the request columns; a round owns `num_tokens`, `drafter_len`, `active` and `history`.
The last row is spare: padding of a round reads it and writes to it, so no write needs a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specdec.adjustments import AdjustmentTables
from specdec.kernels import Sampling, adjust
from specdec.kernels.columns import Adjustments, RowState
from specdec.kernels.round import gather_rows
from specdec.sequence import Sequence
from specdec.uploads import send

STOP_IDS = 8
"""Stop ids per row that a round itself can see. A request with more of them is stopped by the host for the rest."""

_K, _LIMIT, _TOP_K, _SEED, _STOP = range(5)
_TEMPERATURE, _TOP_P, _MIN_P = range(3)


@dataclass(slots=True)
class RowView:
    """The rows of one round, gathered. B rows in the round's order; padding shows the spare row, never active.

    index [B] row numbers; num_tokens [B] l; drafter_len [B] drafter KV; k [B] drafts wished for; limit [B];
    active [B] bool; block_table [B, M] int32, -1 past the reservation; stop_ids [B, STOP_IDS], -1 unused;
    sampling: columns [B]. All int64 unless said. all_tokens: the histories of all rows, not gathered.
    noise, filters: whether any row draws with noise, with filters; known to the host, so that neither costs a look.
    adjustments: what is done to the logits of all rows, None where no row of the round wants anything.
    """

    index: Tensor
    num_tokens: Tensor
    drafter_len: Tensor
    k: Tensor
    limit: Tensor
    active: Tensor
    block_table: Tensor
    all_tokens: Tensor
    stop_ids: Tensor
    sampling: Sampling
    block_size: int
    max_len: int
    noise: bool
    filters: bool
    adjustments: Adjustments | None = None
    gathered: Tensor | None = None

    def copy(self) -> RowView:
        """The same rows with every tensor in memory of its own; `all_tokens` holds these rows alone, in their order.

        Without adjustments: theirs is the engine's own memory.
        """
        left = ("index", "all_tokens", "adjustments", "gathered")
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left}
        columns = {name: x.clone() if isinstance(x, Tensor) else x for name, x in columns.items()}
        columns["sampling"] = Sampling(*(column.clone() for column in self.sampling))
        order = torch.arange(len(self.index), device=self.index.device)
        tokens = self.all_tokens[self.index]
        return RowView(index=order, all_tokens=tokens, gathered=tokens, **columns)

    @property
    def history(self) -> Tensor:
        """[B, max_len + 1] int32: the rows' tokens; what lies past num_tokens is garbage. Gathered at its first use."""
        if self.gathered is None:
            self.gathered = self.all_tokens[self.index]
        return self.gathered

    def adjust(self, logits: Tensor, positions: Tensor, drafts: Tensor, rows: Tensor | None = None) -> Tensor:
        """`kernels.adjust` for these rows; the logits themselves where no row wants anything."""
        if self.adjustments is None:
            return logits
        return adjust(logits, positions, self.adjustments, self, drafts, rows=rows)


class Rows:
    """`num_rows` rows of at most `max_len` tokens, `block_size` tokens a block, on `device`.

    vocab_size: ids that may be drawn.
    """

    def __init__(self, num_rows: int, max_len: int, block_size: int, device: torch.device, vocab_size: int):
        self.num_rows, self.max_len, self.block_size, self.device = num_rows, max_len, block_size, device
        self.vocab_size = vocab_size
        self._adjustments: AdjustmentTables | None = None
        total = num_rows + 1
        self.num_tokens = torch.ones(total, dtype=torch.int64, device=device)
        self.drafter_len = torch.zeros(total, dtype=torch.int64, device=device)
        self.active = torch.zeros(total, dtype=torch.bool, device=device)
        self.history = torch.zeros(total, max_len + 1, dtype=torch.int32, device=device)
        self._table = _Mirror(torch.full((total, -(-max_len // block_size)), -1, dtype=torch.int32), device)
        self._ints = _Mirror(torch.full((_STOP + STOP_IDS, total), -1, dtype=torch.int64), device)
        self._floats = _Mirror(torch.zeros(3, total), device)
        self._ints.host[:_STOP] = 0
        self._num_blocks = [0] * total

    @property
    def state(self) -> RowState:
        """What a round changes, beside `history`."""
        return RowState(self.num_tokens, self.drafter_len, self.active)

    @property
    def block_table(self) -> Tensor:
        return self._table.device

    def join(self, row: int, seq: Sequence, k: int) -> None:
        """Put `seq` into `row`: every known token, its blocks, its parameters; active from the next round on."""
        p, ints, floats = seq.params, self._ints.numbers, self._floats.numbers
        self.set_table(row, seq.table.blocks)
        ints[_K, row], ints[_LIMIT, row], ints[_TOP_K, row], ints[_SEED, row] = k, seq.limit, p.top_k, seq.seed
        stops = seq.stop_ids[:STOP_IDS]
        ints[_STOP:, row] = stops + (-1,) * (STOP_IDS - len(stops))
        floats[_TEMPERATURE, row], floats[_TOP_P, row], floats[_MIN_P, row] = p.temperature, p.top_p, p.min_p
        self._ints.dirty = self._floats.dirty = True
        if self._adjustments is None and seq.params.adjusted:
            self._adjustments = AdjustmentTables(self.num_rows + 1, self.vocab_size, self.device)
        if self._adjustments is not None:
            self._adjustments.join(row, seq)
        tokens = torch.tensor(seq.token_ids, dtype=torch.int32)
        send(tokens, self.history[row, : len(tokens)])
        _set(self.num_tokens, row, len(seq))
        _set(self.drafter_len, row, seq.drafter_len)
        _set(self.active, row, True)

    def leave(self, row: int) -> None:
        """Stop `row` before its blocks are freed: a stale table could write into another sequence's blocks."""
        _set(self.active, row, False)
        self.set_table(row, [])

    def set_table(self, row: int, blocks: list[int], unchanged: int = 0) -> None:
        """unchanged: how many of the first blocks the row has already."""
        table, before = self._table.numbers[row], self._num_blocks[row]
        table[unchanged : len(blocks)] = blocks[unchanged:]
        table[len(blocks) : before] = -1
        self._num_blocks[row] = len(blocks)
        self._table.dirty = True

    def set_k(self, rows: list[int], k: list[int]) -> None:
        """k of each of the rows."""
        self._ints.numbers[_K, rows] = k
        self._ints.dirty = True

    def set_drafter_len(self, row: int, length: int) -> None:
        _set(self.drafter_len, row, length)

    def flush(self) -> None:
        """Send the host's changes, in stream order, before the next forward or round."""
        for mirror in (self._table, self._ints, self._floats):
            mirror.flush()

    def view(self, index: Tensor, *, noise: bool = True, filters: bool = True, adjusted: bool = False) -> RowView:
        """Gather the rows `index` [B] (int64, device); -1 shows the spare row. See RowView for the flags."""
        columns, active, floats, tables = gather_rows(
            index, self.state, self._ints.device, self._floats.device, self._table.device
        )
        row, num_tokens, drafter_len, *ints = columns
        return RowView(
            index=row,
            num_tokens=num_tokens,
            drafter_len=drafter_len,
            k=ints[_K],
            limit=ints[_LIMIT],
            active=active,
            block_table=tables,
            all_tokens=self.history,
            stop_ids=columns[3 + _STOP :].t(),
            sampling=Sampling(
                temperature=floats[_TEMPERATURE],
                top_k=ints[_TOP_K],
                top_p=floats[_TOP_P],
                min_p=floats[_MIN_P],
                seed=ints[_SEED],
            ),
            block_size=self.block_size,
            max_len=self.max_len,
            noise=noise,
            filters=filters,
            adjustments=self._adjustments.columns if adjusted and self._adjustments else None,
        )


class _Mirror:
    """A tensor that the host writes and the device reads; on a CPU both are one tensor.

    numbers: its memory as the host writes to it, since indexing a tensor takes microseconds for every number.
    """

    def __init__(self, host: Tensor, device: torch.device):
        self.host = host
        self.numbers = host.numpy()
        self.device = host if device.type == "cpu" else host.to(device)
        self.dirty = False

    def flush(self) -> None:
        if self.dirty and self.device is not self.host:
            send(self.host, self.device)
        self.dirty = False


def _set(column: Tensor, row: int, value: int | bool) -> None:
    """column[row] = value by a kernel: indexing would copy the value from the host, and wait for the device."""
    column[row : row + 1].fill_(value)
