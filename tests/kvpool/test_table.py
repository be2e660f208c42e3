"""BlockTable: growing, rolling back, sharing, copying on write."""

import pytest

from specdec.kvpool import BlockAllocator, BlockTable, PoolExhausted


@pytest.fixture
def allocator():
    return BlockAllocator(7)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_grow_takes_just_the_blocks_that_are_missing(allocator, block_size):
    table = BlockTable(allocator, block_size)
    assert table.num_slots == 0 and table.grow(0) and table.blocks == []
    assert table.grow(1) and len(table.blocks) == 1
    assert table.grow(block_size) and len(table.blocks) == 1
    assert table.grow(block_size + 1) and len(table.blocks) == 2
    assert table.grow(5 * block_size) and table.num_slots == 5 * block_size
    assert table.grow(2) and len(table.blocks) == 5
    allocator.check([table.blocks])


def test_grow_is_all_or_nothing_and_grow_upto_takes_what_there_is(allocator):
    table = BlockTable(allocator, 3)
    assert table.grow(4) and not table.grow(22) and len(table.blocks) == 2
    assert table.grow_upto(22) and table.num_slots == 21
    assert not table.grow_upto(22) and not table.grow_upto(5) and table.grow(21)
    allocator.check([table.blocks])


def test_truncate_keeps_the_blocks_of_what_is_left(allocator):
    table = BlockTable(allocator, 3)
    table.grow(21)
    blocks = list(table.blocks)
    assert table.truncate(21) == [] == table.truncate(19) and table.truncate(18) == blocks[6:]
    assert table.truncate(4) == blocks[2:6] and table.blocks == blocks[:2]
    assert table.truncate(99) == [] and table.truncate(0) == blocks[:2]
    allocator.check([])


def test_fork_shares_the_blocks_that_hold_positions_below(allocator):
    table = BlockTable(allocator, 3)
    table.grow(8)
    forks = [table.fork(n) for n in (0, 1, 3, 4, 9)]
    assert [len(fork.blocks) for fork in forks] == [0, 1, 1, 2, 3]
    assert all(fork.blocks == table.blocks[: len(fork.blocks)] for fork in forks)
    allocator.check([t.blocks for t in (table, *forks)])
    table.release()
    assert allocator.num_free == 7 - 3
    for fork in forks:
        fork.release()
    allocator.check([])


def test_a_table_takes_over_the_references_of_a_lookup(allocator):
    table = BlockTable(allocator, 3)
    table.grow(6)
    for block, key in zip(table.blocks, "ab", strict=True):
        allocator.publish(block, key)
    hit = BlockTable(allocator, 3, allocator.lookup(["a", "b"]))
    assert hit.blocks == table.blocks and hit.grow(9) and not hit.writable(5) and hit.writable(6)
    allocator.check([table.blocks, hit.blocks])


def test_a_block_is_writable_when_owned_alone_and_not_published(allocator):
    table = BlockTable(allocator, 3)
    table.grow(9)
    allocator.publish(table.blocks[1], "b")
    fork = table.fork(2)
    assert [table.writable(p) for p in range(9)] == [False] * 6 + [True] * 3
    fork.release()
    assert [table.writable(p) for p in (0, 2, 3)] == [True, True, False]


def test_make_writable_replaces_a_shared_block_once(allocator):
    table = BlockTable(allocator, 3)
    table.grow(6)
    fork = table.fork(5)
    source, destination = fork.make_writable(4)
    assert (source, destination) == (table.blocks[1], fork.blocks[1]) and source != destination
    assert fork.make_writable(4) is None and table.make_writable(4) is None
    assert fork.blocks[0] == table.blocks[0]
    allocator.check([table.blocks, fork.blocks])


def test_make_writable_leaves_a_published_block_to_the_cache(allocator):
    table = BlockTable(allocator, 3)
    table.grow(3)
    allocator.publish(table.blocks[0], "a")
    source, destination = table.make_writable(2)
    assert allocator.ref_count(source) == 0 and allocator.ref_count(destination) == 1
    assert allocator.lookup(["a"]) == [source]


def test_make_writable_without_a_free_block_raises_and_changes_nothing(allocator):
    table = BlockTable(allocator, 3)
    table.grow(21)
    fork = table.fork(21)
    with pytest.raises(PoolExhausted, match="position 20"):
        fork.make_writable(20)
    assert fork.blocks == table.blocks
    allocator.check([table.blocks, fork.blocks])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.grow(-1), "num_tokens: expected a count >= 0, got -1"),
        (lambda t: t.grow_upto(-1), "num_tokens"),
        (lambda t: t.truncate(-1), "num_tokens"),
        (lambda t: t.fork(7), "num_tokens: expected at most 6 .*, got 7"),
        (lambda t: t.fork(-1), "num_tokens"),
        (lambda t: t.writable(6), "position: expected 0 <= position < 6, got 6"),
        (lambda t: t.make_writable(-1), "position"),
        (lambda t: BlockTable(BlockAllocator(1), 0), "block_size: expected at least 1, got 0"),
    ],
)
def test_bad_input_is_refused(allocator, call, message):
    table = BlockTable(allocator, 3)
    table.grow(6)
    with pytest.raises(ValueError, match=message):
        call(table)
    allocator.check([table.blocks])
