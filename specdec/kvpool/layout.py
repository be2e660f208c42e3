"""Block tables as the plain integer tensors that paged kernels take.

Built on the host; with `device` they are sent there without making the host wait.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specdec.kvpool.table import BlockTable

Device = torch.device | str | None


def block_table(tables: Sequence[BlockTable], width: int | None = None, *, device: Device = None) -> Tensor:
    """Block ids as [R, M] int32, rows padded with -1. M is `width`, or the longest table's length.

    Raises: ValueError if a table has more than `width` blocks.
    """
    longest = max((len(table.blocks) for table in tables), default=0)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"width: expected at least {longest} (the longest table), got {width}")
    flat = array("i", [-1]) * (len(tables) * width)
    for row, table in enumerate(tables):
        flat[row * width : row * width + len(table.blocks)] = array("i", table.blocks)
    return to_device(flat, device).view(len(tables), width)


def slot_mapping(
    tables: Sequence[BlockTable], positions: Sequence[Sequence[int]], block_size: int, *, device: Device = None
) -> Tensor:
    """Slots `block * block_size + offset` as [N] int64, N the number of positions over all rows, row after row.

    -1, "write nothing", stands where the row has no slot: a negative position, or one past its blocks.
    Raises: ValueError if `positions` has not one entry per table, or a table has another block size.
    """
    _check_rows(tables, positions, "positions", block_size)
    slots = array("q")
    for table, row in zip(tables, positions, strict=True):
        blocks, num_slots = table.blocks, table.num_slots
        slots.extend(blocks[p // block_size] * block_size + p % block_size if 0 <= p < num_slots else -1 for p in row)
    return to_device(slots, device)


def page_indices(
    tables: Sequence[BlockTable], seq_lens: Sequence[int], block_size: int, *, device: Device = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks that hold the first `seq_lens[r]` positions of each row, in CSR form as FlashInfer takes them.

    Returns: indptr [R + 1] int32, indices [indptr[R]] int32, last_page_len [R] int32: the filled slots of a row's last
    block, in 1..block_size; 0 for an empty row.
    Raises: ValueError if `seq_lens` has not one entry per table, a length is negative or exceeds its table's slots,
    or a table has another block size.
    """
    _check_rows(tables, seq_lens, "seq_lens", block_size)
    for row, (table, length) in enumerate(zip(tables, seq_lens, strict=True)):
        if not 0 <= length <= table.num_slots:
            raise ValueError(f"seq_lens[{row}]: expected 0..{table.num_slots} (the table's slots), got {length}")
    pages = [-(-length // block_size) for length in seq_lens]
    indices = array("i")
    for table, count in zip(tables, pages, strict=True):
        indices.fromlist(table.blocks[:count])  # a quarter of the time of extend
    last = array("i", (length - max(count - 1, 0) * block_size for length, count in zip(seq_lens, pages, strict=True)))
    return cu_seqlens(pages, device=device), to_device(indices, device), to_device(last, device)


def cu_seqlens(lengths: Iterable[int], *, device: Device = None) -> Tensor:
    """Prefix sum of lengths with a leading 0, as [R + 1] int32. Raises ValueError if a length is negative."""
    lengths = list(lengths)
    if min(lengths, default=0) < 0:
        raise ValueError(f"lengths: expected counts >= 0, got {min(lengths)}")
    return to_device(array("i", accumulate(lengths, initial=0)), device)


def to_device(values: "array[int]", device: Device = None) -> Tensor:
    """An array of C ints ("i" or "q") as a tensor [len(values)] int32 or int64 on `device`, default the CPU.

    On the CPU the tensor shares the array's memory: the caller gives the array up.
    """
    dtype = torch.int32 if values.typecode == "i" else torch.int64
    # frombuffer shares the memory, which the tensor then keeps alive; it refuses an empty buffer.
    host = torch.frombuffer(values, dtype=dtype) if len(values) else torch.empty(0, dtype=dtype)
    if device is None or torch.device(device).type == "cpu":
        return host
    if torch.device(device).type == "cuda":
        host = host.pin_memory()  # from pageable memory the host would wait for the stream
    return host.to(device, non_blocking=True)


def _check_rows(tables: Sequence[BlockTable], values: Sequence[object], name: str, block_size: int) -> None:
    if len(values) != len(tables):
        raise ValueError(f"{name}: expected one entry for each of {len(tables)} tables, got {len(values)}")
    for row, table in enumerate(tables):
        if table.block_size != block_size:
            raise ValueError(f"block_size: expected {table.block_size} (of tables[{row}]), got {block_size}")
