"""Random lives of sequences over one small pool, against a ledger that says who owns what.

The KV tensors hold each row's own tokens, so that a block handed out too early, a missed copy on write or a wrong
prefix hit shows as a wrong token, not only as a wrong count.
"""

from collections import Counter

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.kvpool import BlockTable, KVPool, KVSpec, PoolExhausted, prefix_keys, slot_mapping

NUM_BLOCKS, BLOCK_SIZE = 11, 3
MODELS = ("target", "drafter")
ROW = st.integers(0, 10**6)  # taken modulo the number of rows
FEW_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)  # two token ids: prefixes repeat


class Ledger:
    """What the allocator should believe, kept the simplest way."""

    def __init__(self):
        self.refs: Counter[int] = Counter()
        self.block_of: dict[bytes, int] = {}
        self.cached: list[int] = []  # least recently used first
        self.complete: set[tuple[str, int]] = set()

    @property
    def num_free(self):
        return NUM_BLOCKS - len(+self.refs)

    def take(self, blocks):
        """`blocks` were allocated: free ones without a prefix first, then evictions in order."""
        plain = self.num_free - len(self.cached)
        evicted = blocks[plain:]
        assert not any(self.refs[b] for b in blocks) and len(set(blocks)) == len(blocks)
        assert not set(blocks[:plain]) & set(self.cached)
        assert evicted == self.cached[: len(evicted)]
        del self.cached[: len(evicted)]
        self.block_of = {key: b for key, b in self.block_of.items() if b not in evicted}
        self.complete = {(model, b) for model, b in self.complete if b not in evicted}
        self.refs.update(blocks)

    def share(self, blocks):
        self.cached = [b for b in self.cached if b not in blocks]
        self.refs.update(blocks)

    def drop(self, blocks):
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.park(block)

    def park(self, block):
        if block in self.block_of.values():
            self.cached.append(block)
        else:
            self.complete = {(model, b) for model, b in self.complete if b != block}


class Row:
    def __init__(self, table, tokens):
        self.table, self.tokens = table, tokens


class Lives(RuleBasedStateMachine):
    """Rows come, grow, fork, roll back and leave; blocks are also held raw, as a user of the allocator alone would."""

    def __init__(self):
        super().__init__()
        self.pool = KVPool(NUM_BLOCKS, BLOCK_SIZE, poison=True)
        self.allocator = self.pool.allocator
        self.pool.add_model("target", [KVSpec(layer, 2, 1, 1, torch.float32, "cpu") for layer in range(2)])
        self.pool.add_model("drafter", [KVSpec(0, 1, 1, 2, torch.float32, "cpu")])
        self.flat = [t.view(NUM_BLOCKS * BLOCK_SIZE, -1) for m in MODELS for pair in self.pool.kv(m) for t in pair]
        self.ledger = Ledger()
        self.rows: list[Row] = []
        self.held: list[list[int]] = []

    def row(self, index):
        return self.rows[index % len(self.rows)]

    def write(self, row, start):
        """Store the tokens from `start` on, copying what is shared or published; False if the pool has no block."""
        for position in range(start, len(row.tokens)):
            try:
                pair = row.table.make_writable(position)
            except PoolExhausted:
                assert self.ledger.num_free == 0
                return False
            if pair is not None:
                self.ledger.take([pair[1]])
                self.ledger.drop([pair[0]])
                self.pool.copy_blocks([pair])
            slots = slot_mapping([row.table], [[position]], BLOCK_SIZE)
            for flat in self.flat:
                flat[slots] = float(row.tokens[position])
        return True

    def grow(self, row, num_tokens):
        old = len(row.table.blocks)
        missing = -(-num_tokens // BLOCK_SIZE) - old
        assert row.table.grow(num_tokens) == (missing <= self.ledger.num_free)
        self.ledger.take(row.table.blocks[old:])
        return row.table.num_slots >= num_tokens

    @rule(tokens=FEW_TOKENS)
    def admit(self, tokens):
        keys = prefix_keys(tokens, BLOCK_SIZE, upto=len(tokens))
        hit = self.allocator.lookup(keys)
        run = [self.ledger.block_of.get(key) for key in keys]
        assert hit == run[: run.index(None) if None in run else None]
        self.ledger.share(hit)
        row = Row(BlockTable(self.allocator, BLOCK_SIZE, hit), tokens)
        self.rows.append(row)
        if not self.grow(row, len(tokens)) or not self.write(row, len(hit) * BLOCK_SIZE):
            self.leave(len(self.rows) - 1)

    @precondition(lambda self: self.rows)
    @rule(index=ROW, tokens=FEW_TOKENS)
    def extend(self, index, tokens):
        row = self.row(index)
        old = len(row.tokens)
        if self.grow(row, old + len(tokens)):
            row.tokens = row.tokens + tokens
            if not self.write(row, old):
                self.leave(index)

    @precondition(lambda self: self.rows)
    @rule(index=ROW, ahead=st.integers(0, 40))
    def reserve(self, index, ahead):
        table = self.row(index).table
        old = list(table.blocks)
        changed = table.grow_upto(len(self.row(index).tokens) + ahead)
        assert changed == (len(table.blocks) > len(old)) and table.blocks[: len(old)] == old
        self.ledger.take(table.blocks[len(old) :])

    @precondition(lambda self: self.rows)
    @rule(index=ROW, length=st.integers(0, 30))
    def truncate(self, index, length):
        row = self.row(index)
        old = list(row.table.blocks)
        dropped = row.table.truncate(length)
        assert row.table.blocks + dropped == old and len(row.table.blocks) == min(len(old), -(-length // BLOCK_SIZE))
        self.ledger.drop(dropped)
        row.tokens = row.tokens[:length]

    @precondition(lambda self: self.rows)
    @rule(index=ROW, length=st.integers(0, 30))
    def fork(self, index, length):
        row = self.row(index)
        length = min(length, len(row.tokens))
        self.rows.append(Row(row.table.fork(length), row.tokens[:length]))
        self.ledger.share(self.rows[-1].table.blocks)

    @precondition(lambda self: self.rows)
    @rule(index=ROW)
    def leave(self, index):
        row = self.row(index)
        self.rows.remove(row)
        blocks = list(row.table.blocks)
        row.table.release()
        self.ledger.drop(blocks)

    @precondition(lambda self: self.rows)
    @rule(index=ROW)
    def publish(self, index):
        row = self.row(index)
        for index, key in enumerate(prefix_keys(row.tokens, BLOCK_SIZE, upto=len(row.tokens))):
            block = row.table.blocks[index]
            self.allocator.publish(block, key)
            if key not in self.ledger.block_of and block not in self.ledger.block_of.values():
                self.ledger.block_of[key] = block

    @precondition(lambda self: self.rows)
    @rule(index=ROW, model=st.sampled_from(MODELS), count=st.integers(1, 4))
    def mark_complete(self, index, model, count):
        for block in self.row(index).table.blocks[:count]:
            self.allocator.mark_complete(model, block)
            self.ledger.complete.add((model, block))

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count):
        blocks = self.allocator.allocate(count)
        assert (blocks is None) == (count > self.ledger.num_free)
        if blocks:
            assert len(blocks) == count
            self.ledger.take(blocks)
            self.held.append(blocks)

    @precondition(lambda self: self.rows)
    @rule(index=ROW, start=st.integers(0, 3), count=st.integers(0, 3))
    def retain(self, index, start, count):
        blocks = self.row(index).table.blocks[start : start + count]
        self.allocator.retain(blocks)
        self.ledger.share(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(index=ROW)
    def release(self, index):
        blocks = self.held.pop(index % len(self.held))
        self.allocator.release(blocks)
        self.ledger.drop(blocks)

    @rule()
    def reset(self):
        self.allocator.reset_prefix_cache()
        self.ledger.block_of.clear()
        self.ledger.complete = {(model, b) for model, b in self.ledger.complete if self.ledger.refs[b]}
        self.ledger.cached.clear()

    @rule(model=st.sampled_from(MODELS))
    def forget(self, model):
        self.allocator.forget_model(model)
        self.ledger.complete = {(m, b) for m, b in self.ledger.complete if m != model}

    @invariant()
    def the_allocator_agrees_with_the_ledger(self):
        self.allocator.check([*(row.table.blocks for row in self.rows), *self.held])
        assert self.allocator.num_free == self.ledger.num_free
        assert self.allocator.num_evictable == len(self.ledger.cached)
        assert all(self.allocator.is_cached(key) for key in self.ledger.block_of)
        for block in range(NUM_BLOCKS):
            assert self.allocator.ref_count(block) == self.ledger.refs[block]
            assert self.allocator.is_published(block) == (block in self.ledger.block_of.values())
            for model in MODELS:
                assert self.allocator.is_complete(model, block) == ((model, block) in self.ledger.complete)

    @invariant()
    def every_row_reads_its_own_tokens(self):
        slots = slot_mapping([r.table for r in self.rows], [range(len(r.tokens)) for r in self.rows], BLOCK_SIZE)
        expected = torch.tensor([float(token) for row in self.rows for token in row.tokens])[:, None]
        for flat in self.flat:
            assert torch.equal(flat[slots], expected.expand(-1, flat.shape[1]))

    def teardown(self):
        for row in self.rows:
            row.table.release()
        for blocks in self.held:
            self.allocator.release(blocks)
        self.allocator.check([])
        assert self.allocator.num_free == NUM_BLOCKS


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)
test_random_lives_of_sequences = Lives.TestCase
