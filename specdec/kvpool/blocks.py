"""Ownership of block ids: free list, reference counts, prefix hashes, completeness per model.

Host only: knows nothing of tensors, tokens or sequences. Every operation costs O(1) per block.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

Key = bytes | int


class PoolExhausted(RuntimeError):
    """No free block was left for an operation that cannot be refused half way."""


class BlockAllocator:
    """Hands out `num_blocks` block ids and remembers which free ones still hold a reusable prefix.

    A block is owned (reference count >= 1) or free; a free block that was published stays findable until it is evicted.
    Not thread-safe: one thread calls it.
    """

    def __init__(self, num_blocks: int):
        """Args: num_blocks, at least 1. Raises ValueError otherwise."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks: expected at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._uncached = list(range(num_blocks - 1, -1, -1))  # a stack: a fresh pool hands out 0, 1, 2, ...
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and published, least recently used first
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._complete: dict[int, set[str]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out; cached blocks count, for they can be evicted."""
        return len(self._uncached) + len(self._cached)

    @property
    def num_evictable(self) -> int:
        """Free blocks that hold a findable prefix."""
        return len(self._cached)

    def allocate(self, n: int) -> list[int] | None:
        """Take n blocks with reference count 1 each, or None (and no change) if fewer are free.

        Blocks without a prefix go first; then the least recently used cached ones are evicted.
        Raises ValueError if n is negative.
        """
        if n < 0:
            raise ValueError(f"n: expected a count >= 0, got {n}")
        if n > self.num_free:
            return None
        cut = max(len(self._uncached) - n, 0)
        blocks = self._uncached[cut:]
        blocks.reverse()
        del self._uncached[cut:]
        while len(blocks) < n:
            blocks.append(self._evict())
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self._complete.pop(block, None)
        return block

    def retain(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block. Raises ValueError, changing nothing, if one is free or out of range."""
        self._require_owned(blocks)
        for block in blocks:
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; `blocks` are in sequence order.

        At count 0 a published block becomes the most recently used cached one, any other block is simply free.
        The tail is dropped first, so the head of a prefix, which more prompts share, is evicted last.
        Raises ValueError, changing nothing, if a block is free, out of range, or given more often than it is owned.
        """
        self._require_owned(blocks)
        if len(set(blocks)) < len(blocks):
            self._require_counts(blocks)
        refs = self._refs
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                self._park(block)

    def _park(self, block: int) -> None:
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._complete.pop(block, None)
            self._uncached.append(block)

    def ref_count(self, block: int) -> int:
        """References to the block, 0 if it is free. Raises ValueError if it is out of range."""
        self._require_in_range(block)
        return self._refs[block]

    def lookup(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest run keys[0], keys[1], ... that is cached, each retained for the caller.

        Keys are parent-chained (`prefix_keys`), so a hit of key i means that the whole prefix up to block i agrees.
        A published block may still be incomplete for some model: ask `is_complete`.
        """
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
            blocks.append(block)
        return blocks

    def is_cached(self, key: Key) -> bool:
        """Whether `lookup` would find a block, owned or free, under this key; retains nothing."""
        return key in self._block_of

    def publish(self, block: int, key: Key) -> None:
        """Make an owned block findable under `key`; does nothing if the block or the key is already published.

        The caller answers for the content: full, and every position committed with KV (invariant 3 of the design).
        Raises ValueError if the block is free or out of range.
        """
        self._require_owned((block,))
        if block not in self._key_of and key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def key_of(self, block: int) -> Key | None:
        """The key that `block` is published under, None if it is not."""
        self._require_in_range(block)
        return self._key_of.get(block)

    def is_published(self, block: int) -> bool:
        """Whether the block can be found by `lookup`. Raises ValueError if it is out of range."""
        self._require_in_range(block)
        return block in self._key_of

    def mark_complete(self, model: str, block: int) -> None:
        """Record that every slot of the owned block holds `model`'s KV, as of the work enqueued so far.

        It lasts until the block is evicted, or freed without having been published.
        Raises ValueError if the block is free or out of range.
        """
        self._require_owned((block,))
        self._complete.setdefault(block, set()).add(model)

    def is_complete(self, model: str, block: int) -> bool:
        """Whether `mark_complete(model, block)` still holds. Raises ValueError if the block is out of range."""
        self._require_in_range(block)
        return model in self._complete.get(block, ())

    def forget_model(self, model: str) -> None:
        """No block is complete for `model` any more: its KV tensors are gone, or its weights changed."""
        for block in [block for block, models in self._complete.items() if model in models]:
            self._complete[block].discard(model)
            if not self._complete[block]:
                del self._complete[block]

    def reset_prefix_cache(self) -> None:
        """Forget every hash; owned blocks stay owned and complete, and can be published anew.

        After a change of weights, do this when nothing runs, or change the salt of the keys: a sequence that started
        under the old weights would publish their KV.
        """
        for block in self._cached:
            self._complete.pop(block, None)
        self._uncached.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._key_of.clear()

    def check(self, owners: Iterable[Sequence[int]] | None = None) -> None:
        """Raise AssertionError naming the broken part of invariant 2, if one is broken. O(num_blocks), for debugging.

        Args: owners, the block lists of every living table; given, each reference count must equal its occurrences.
        """
        free = [*self._uncached, *self._cached]
        unowned = {block for block, count in enumerate(self._refs) if count == 0}
        _require(all(count >= 0 for count in self._refs), f"negative reference count in {self._refs}")
        _require(len(set(free)) == len(free), f"a block is free twice: {sorted(free)}")
        _require(set(free) == unowned, f"free + owned != all: differ in {sorted(set(free) ^ unowned)}")
        inverse = {block: key for key, block in self._block_of.items()}
        _require(inverse == self._key_of and len(inverse) == len(self._block_of), "hash maps are not inverse")
        _require(self._key_of.keys() & unowned == self._cached.keys(), "cached blocks != free published blocks")
        _require(self._complete.keys().isdisjoint(self._uncached), "a free block without a prefix is marked complete")
        if owners is not None:
            held = Counter(block for blocks in owners for block in blocks)
            wrong = {b: (count, held[b]) for b, count in enumerate(self._refs) if count != held[b]}
            _require(not wrong, f"block: (reference count, owners) disagree: {wrong}")

    def _require_in_range(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block: expected 0 <= block < {self.num_blocks}, got {block}")

    def _require_owned(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not 0 <= block < self.num_blocks or self._refs[block] == 0:
                self._require_in_range(block)
                raise ValueError(f"block: expected an owned block, got {block}, which is free")

    def _require_counts(self, blocks: Sequence[int]) -> None:
        for block, count in Counter(blocks).items():
            if count > self._refs[block]:
                raise ValueError(
                    f"blocks: expected block {block} at most {self._refs[block]} times, got it {count} times"
                )


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise AssertionError(f"invariant 2: {broken}")  # not an assert statement, which `python -O` drops
