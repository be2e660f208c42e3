"""The blocks of one sequence: grow, truncate, fork, copy on write. Host only, moves no data itself."""

from collections.abc import Sequence

from specdec.kvpool.blocks import BlockAllocator, PoolExhausted


class BlockTable:
    """Position p of the sequence lives in block `blocks[p // block_size]`, at offset `p % block_size`.

    A table holds one reference to each of its blocks. It does not know how many of its slots are filled.
    """

    __slots__ = ("_allocator", "block_size", "blocks")

    def __init__(self, allocator: BlockAllocator, block_size: int, blocks: Sequence[int] = ()):
        """Args: blocks, owned blocks whose references the table takes over (as `allocator.lookup` returns them).

        Raises ValueError if block_size < 1.
        """
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {block_size}")
        self._allocator = allocator
        self.block_size = block_size
        self.blocks = list(blocks)

    def __repr__(self) -> str:
        return f"BlockTable(block_size={self.block_size}, blocks={self.blocks})"

    @property
    def num_slots(self) -> int:
        """Positions the table has room for."""
        return len(self.blocks) * self.block_size

    def grow(self, num_tokens: int) -> bool:
        """Make room for positions 0..num_tokens - 1. False, and no change, if the free blocks do not suffice."""
        missing = self._blocks_for(num_tokens) - len(self.blocks)
        if missing <= 0:
            return True
        blocks = self._allocator.allocate(missing)
        if blocks is None:
            return False
        self.blocks += blocks
        return True

    def grow_upto(self, num_tokens: int) -> bool:
        """Grow towards `num_tokens` positions as far as the free blocks last. True if the table changed."""
        missing = self._blocks_for(num_tokens) - len(self.blocks)
        if missing <= 0:
            return False
        blocks = self._allocator.allocate(min(missing, self._allocator.num_free))
        self.blocks += blocks or ()
        return bool(blocks)

    def truncate(self, num_tokens: int) -> list[int]:
        """Keep the blocks of positions < num_tokens; release the rest and return it in sequence order.

        This is the roll-back of rejected drafts: nothing is copied or cleared, what lies past the end is overwritten.
        """
        kept = self._blocks_for(num_tokens)
        dropped = self.blocks[kept:]
        if dropped:
            self._allocator.release(dropped)
            del self.blocks[kept:]
        return dropped

    def fork(self, num_tokens: int) -> "BlockTable":
        """A table that shares the blocks of positions < num_tokens, the partly filled last one included.

        Whichever of the two writes into that last block first calls `make_writable`.
        Raises ValueError if the table has no room for `num_tokens` positions.
        """
        if num_tokens > self.num_slots:
            raise ValueError(f"num_tokens: expected at most {self.num_slots} (the table's slots), got {num_tokens}")
        shared = self.blocks[: self._blocks_for(num_tokens)]
        self._allocator.retain(shared)
        return BlockTable(self._allocator, self.block_size, shared)

    def release(self) -> None:
        """Give all blocks back. The table is empty afterwards and can grow again."""
        self.truncate(0)

    def writable(self, position: int) -> bool:
        """Whether the block of `position` is this table's alone and not published, so that any slot may be rewritten.

        A block that is not writable may still be filled for a model that lacks it (`is_complete`), since that repeats
        what the other owners would write. Raises ValueError if the table has no slot for the position.
        """
        block = self.blocks[self._index(position)]
        return self._allocator.ref_count(block) == 1 and not self._allocator.is_published(block)

    def make_writable(self, position: int) -> tuple[int, int] | None:
        """Copy on write: give the block of `position` up for a fresh one, unless it is writable already.

        Returns: (source, destination) for `KVPool.copy_blocks`, or None if nothing was needed. The source may be free
        afterwards, so enqueue the copy before anything else that writes to the pool.
        Raises: PoolExhausted if no block is free, ValueError if the table has no slot for the position.
        """
        if self.writable(position):
            return None
        fresh = self._allocator.allocate(1)
        if fresh is None:
            raise PoolExhausted(f"no free block to copy the shared block of position {position} to")
        index = self._index(position)
        source, self.blocks[index] = self.blocks[index], fresh[0]
        self._allocator.release([source])
        return source, fresh[0]

    def _blocks_for(self, num_tokens: int) -> int:
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected a count >= 0, got {num_tokens}")
        return -(-num_tokens // self.block_size)

    def _index(self, position: int) -> int:
        if not 0 <= position < self.num_slots:
            raise ValueError(f"position: expected 0 <= position < {self.num_slots}, got {position}")
        return position // self.block_size
