"""The integer tensors for kernels, against each other and against plain arithmetic."""

import pytest
import torch

from specdec.kvpool import BlockAllocator, BlockTable, block_table, cu_seqlens, page_indices, slot_mapping

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BLOCK_SIZE = 3


@pytest.fixture
def tables():
    """Tables of 2, 0, 4 and 1 blocks, in an order of ids that is not ascending."""
    allocator = BlockAllocator(9)
    allocator.allocate(9)
    allocator.release([3, 8, 0, 6, 1, 7, 2, 5, 4])
    tables = [BlockTable(allocator, BLOCK_SIZE, allocator.allocate(n)) for n in (2, 0, 4, 1)]
    assert tables[2].blocks != sorted(tables[2].blocks)
    return tables


@pytest.mark.parametrize("device", DEVICES)
def test_block_table_pads_with_minus_one(tables, device):
    table = block_table(tables, device=device)
    assert table.shape == (4, 4) and table.dtype == torch.int32 and table.device.type == device
    assert table.tolist() == [t.blocks + [-1] * (4 - len(t.blocks)) for t in tables]
    wide = block_table(tables, 7, device=device)
    assert torch.equal(wide[:, :4], table) and (wide[:, 4:] == -1).all()


def test_block_table_of_nothing():
    assert block_table([]).shape == (0, 0) and block_table([], 5).shape == (0, 5)
    empty = BlockTable(BlockAllocator(1), 1)
    assert block_table([empty, empty]).shape == (2, 0) and block_table([empty], 2).tolist() == [[-1, -1]]


@pytest.mark.parametrize("device", DEVICES)
def test_slot_mapping_is_block_times_size_plus_offset(tables, device):
    positions = [range(6), [0, 1], [11, 4, 4, 12, -1], []]
    slots = slot_mapping(tables, positions, BLOCK_SIZE, device=device)
    assert slots.dtype == torch.int64 and slots.device.type == device
    table = block_table(tables).tolist()
    expected = [
        table[row][p // 3] * 3 + p % 3 if 0 <= p < 3 * len(tables[row].blocks) else -1
        for row, ps in enumerate(positions)
        for p in ps
    ]
    assert slots.tolist() == expected
    assert slots.tolist()[6:8] == [-1, -1] and slots.tolist()[-2:] == [-1, -1]
    assert slot_mapping([], [], BLOCK_SIZE).shape == (0,)


@pytest.mark.parametrize("seq_lens", [[6, 0, 12, 3], [4, 0, 10, 1], [3, 0, 0, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("device", DEVICES)
def test_page_indices_equal_the_block_table(tables, seq_lens, device):
    indptr, indices, last = page_indices(tables, seq_lens, BLOCK_SIZE, device=device)
    assert {t.dtype for t in (indptr, indices, last)} == {torch.int32} and indices.device.type == device
    table, bounds, last = block_table(tables, 4), indptr.tolist(), last.tolist()
    assert indptr.shape == (5,) and bounds[-1] == len(indices)
    for row, length in enumerate(seq_lens):
        pages = bounds[row + 1] - bounds[row]
        assert indices[bounds[row] : bounds[row + 1]].tolist() == table[row, :pages].tolist()
        assert max(pages - 1, 0) * BLOCK_SIZE + last[row] == length
        assert 1 <= last[row] <= BLOCK_SIZE or length == pages == last[row] == 0


def test_cu_seqlens_is_a_prefix_sum():
    cu = cu_seqlens(n for n in (3, 0, 5))
    assert cu.tolist() == [0, 3, 3, 8] and cu.dtype == torch.int32
    assert cu_seqlens([]).tolist() == [0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: block_table(t, 3), "width: expected at least 4 .*, got 3"),
        (lambda t: slot_mapping(t, [[]], 3), "positions: expected one entry for each of 4 tables, got 1"),
        (lambda t: slot_mapping(t, [[]] * 4, 2), "block_size: expected 3 .*, got 2"),
        (lambda t: page_indices(t, [1], 3), "seq_lens: expected one entry"),
        (lambda t: page_indices(t, [7, 0, 0, 0], 3), r"seq_lens\[0\]: expected 0..6 .*, got 7"),
        (lambda t: page_indices(t, [0, 0, -1, 0], 3), r"seq_lens\[2\]: .* got -1"),
        (lambda t: cu_seqlens([1, -2]), "lengths: expected counts >= 0, got -2"),
    ],
)
def test_bad_input_is_refused(tables, call, message):
    with pytest.raises(ValueError, match=message):
        call(tables)
