"""BlockAllocator: who owns what, what stays findable, and who is evicted first."""

import pytest

from specdec.kvpool import BlockAllocator


def published(num_blocks, keys):
    """An allocator one of whose sequences owns a published block per key; returns both."""
    allocator = BlockAllocator(num_blocks)
    blocks = allocator.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        allocator.publish(block, key)
    return allocator, blocks


def test_allocate_is_all_or_nothing():
    allocator = BlockAllocator(7)
    assert allocator.allocate(0) == []
    first = allocator.allocate(5)
    assert first == [0, 1, 2, 3, 4] and allocator.num_free == 2
    assert allocator.allocate(3) is None and allocator.num_free == 2
    assert allocator.allocate(2) == [5, 6] and allocator.num_free == 0
    assert allocator.allocate(1) is None and allocator.allocate(0) == []
    allocator.check([first, [5, 6]])


def test_release_returns_a_block_at_its_last_reference():
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    allocator.retain(blocks)
    allocator.release(blocks)
    assert [allocator.ref_count(b) for b in blocks] == [1, 1] and allocator.num_free == 1
    allocator.release([*blocks])
    assert [allocator.ref_count(b) for b in range(3)] == [0, 0, 0] and allocator.num_free == 3
    allocator.check([])


def test_lookup_takes_the_longest_run_and_retains_it():
    allocator, blocks = published(5, ["a", "b", "c"])
    assert allocator.lookup(["a", "b", "x", "c"]) == blocks[:2]
    assert [allocator.ref_count(b) for b in blocks] == [2, 2, 1]
    assert allocator.lookup(["x", "a"]) == [] == allocator.lookup([])
    allocator.release(blocks)
    allocator.release(blocks[:2])
    assert allocator.num_free == 5 and allocator.num_evictable == 3
    assert allocator.lookup(["a", "b", "c"]) == blocks and allocator.num_free == 2
    allocator.check([blocks])


def test_a_published_block_is_never_handed_out_while_owned():
    allocator, (kept, dropped) = published(3, ["a", "b"])
    allocator.release([dropped])
    assert sorted(allocator.allocate(2)) == sorted({0, 1, 2} - {kept})
    assert allocator.allocate(1) is None
    assert allocator.lookup(["a"]) == [kept] and allocator.lookup(["b"]) == []


def test_blocks_without_a_prefix_go_before_cached_ones():
    allocator, cached = published(5, ["a", "b"])
    plain = allocator.allocate(2)
    allocator.release(plain)
    allocator.release(cached)
    assert set(allocator.allocate(3)) == {*plain, 4} and allocator.num_evictable == 2
    allocator.check()


def test_eviction_is_least_recently_used_first_and_tails_before_heads():
    allocator, blocks = published(6, ["a", "b", "c", "x", "y", "z"])
    abc, xyz = blocks[:3], blocks[3:]
    allocator.release(abc)
    allocator.release(xyz)
    allocator.release(allocator.lookup(["a", "b"]))  # used again: now younger than x, y, z
    order = [allocator.allocate(1)[0] for _ in range(6)]
    assert order == [abc[2], xyz[2], xyz[1], xyz[0], abc[1], abc[0]]


def test_eviction_forgets_the_key():
    allocator, blocks = published(2, ["a", "b"])
    allocator.release(blocks)
    (evicted,) = allocator.allocate(1)
    assert evicted == blocks[1] and not allocator.is_published(evicted)
    assert allocator.is_cached("a") and not allocator.is_cached("b")
    allocator.publish(evicted, "b")
    assert allocator.lookup(["a", "b"]) == blocks
    allocator.check([[evicted], blocks])


def test_publish_keeps_the_first_block_of_a_key_and_the_first_key_of_a_block():
    allocator, (a, b) = published(3, ["a", "b"])
    (other,) = allocator.allocate(1)
    allocator.publish(other, "a")
    allocator.publish(b, "c")
    assert not allocator.is_published(other)
    assert allocator.lookup(["a"]) == [a] and allocator.lookup(["c"]) == []
    allocator.check()


def test_completeness_is_per_model_and_ends_with_eviction():
    allocator, (block,) = published(1, ["a"])
    allocator.mark_complete("target", block)
    assert allocator.is_complete("target", block) and not allocator.is_complete("drafter", block)
    allocator.release([block])
    assert allocator.is_complete("target", block)  # still there for the next hit
    allocator.lookup(["a"])
    allocator.mark_complete("drafter", block)
    allocator.release([block])
    allocator.allocate(1)
    assert not allocator.is_complete("target", block) and not allocator.is_complete("drafter", block)


def test_completeness_ends_when_an_unpublished_block_is_freed():
    allocator = BlockAllocator(1)
    allocator.mark_complete("target", allocator.allocate(1)[0])
    allocator.release([0])
    assert not allocator.is_complete("target", 0)
    allocator.check([])


def test_forget_model_ends_the_completeness_of_that_model_only():
    allocator, blocks = published(2, ["a", "b"])
    allocator.mark_complete("target", 0)
    for block in blocks:
        allocator.mark_complete("drafter", block)
    allocator.forget_model("drafter")
    assert [allocator.is_complete("drafter", b) for b in blocks] == [False, False]
    assert allocator.is_complete("target", 0)
    allocator.check([blocks])


def test_reset_prefix_cache_forgets_hashes_but_not_owners():
    allocator, blocks = published(4, ["a", "b", "c"])
    for block in blocks:
        allocator.mark_complete("target", block)
    allocator.release(blocks[1:])
    allocator.reset_prefix_cache()
    assert allocator.lookup(["a"]) == [] and allocator.num_evictable == 0
    assert allocator.ref_count(blocks[0]) == 1 and allocator.num_free == 3
    assert [allocator.is_complete("target", b) for b in blocks] == [True, False, False]
    allocator.publish(blocks[0], "a")
    allocator.check([blocks[:1]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: BlockAllocator(0), "num_blocks: expected at least 1, got 0"),
        (lambda a: a.allocate(-1), "n: expected a count >= 0, got -1"),
        (lambda a: a.release([0, 3]), "got 3, which is free"),
        (lambda a: a.release([1, 0, 1]), "block 1 at most 1 times, got it 2 times"),
        (lambda a: a.release([0, -1]), "0 <= block < 5, got -1"),
        (lambda a: a.retain([0, 5]), "0 <= block < 5, got 5"),
        (lambda a: a.retain([0, 4]), "got 4, which is free"),
        (lambda a: a.publish(3, "k"), "got 3, which is free"),
        (lambda a: a.mark_complete("target", 3), "got 3, which is free"),
        (lambda a: a.is_complete("target", 5), "got 5"),
        (lambda a: a.is_published(-1), "got -1"),
        (lambda a: a.ref_count(5), "got 5"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(call, message):
    allocator = BlockAllocator(5)
    owned = allocator.allocate(2)
    with pytest.raises(ValueError, match=message):
        call(allocator)
    assert [allocator.ref_count(b) for b in range(5)] == [1, 1, 0, 0, 0]
    allocator.check([owned])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a._uncached.append(a._uncached[0]), "free twice"),
        (lambda a: a._uncached.pop(), "free \\+ owned"),
        (lambda a: a._refs.__setitem__(0, 0), "free \\+ owned"),
        (lambda a: a._key_of.pop(0), "not inverse"),
        (lambda a: a._cached.__setitem__(a._uncached.pop(), None), "cached blocks"),
        (lambda a: a._complete.__setitem__(4, {"target"}), "marked complete"),
        (lambda a: a.retain([1]), "disagree: {1: \\(2, 1\\)}"),
    ],
)
def test_check_names_the_broken_invariant(damage, message):
    allocator, blocks = published(5, ["a", "b"])
    allocator.check([blocks])
    damage(allocator)
    with pytest.raises(AssertionError, match=message):
        allocator.check([blocks])
