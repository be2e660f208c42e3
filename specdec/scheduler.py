"""Who runs: rows, blocks and order. Admission, prompt chunks, reservation, preemption, prefixes. Host only.

It speaks to the device through `Rows` alone; running models is the engine's business.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from specdec.kvpool import BlockTable, KVPool, prefix_keys
from specdec.rows import Rows
from specdec.sequence import Sequence, Status

TARGET, DRAFTER = "target", "drafter"


@dataclass(slots=True)
class Chunk:
    """Positions start .. end - 1 of a sequence, to be extended."""

    seq: Sequence
    start: int
    end: int


class Scheduler:
    """Rows and blocks for sequences. `prompt_budget`: tokens that prompts may take between two rounds.

    has_drafter: whether a drafter keeps KV in the pool. salt: what else than tokens changes the KV (see prefix_keys).
    """

    def __init__(self, pool: KVPool, rows: Rows, *, prompt_budget: int, has_drafter: bool, salt: bytes = b""):
        self.pool, self.rows = pool, rows
        self.prompt_budget, self.has_drafter, self.salt = prompt_budget, has_drafter, salt
        self.waiting: deque[Sequence] = deque()
        self.resting: set[Sequence] = set()  # those whose drafter is left alone for now, and may lag
        self.placed: list[Sequence | None] = [None] * rows.num_rows
        self._in_order: list[Sequence] = []  # the same, in the order of their arrival
        self._by_status: dict[Status, list[Sequence]] = {}  # filled when asked for, emptied with every change
        self.changes = 0  # of which sequences hold rows and which of them run
        self.preemptions = 0

    # -- who is where

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that hold a row, in the order of their arrival."""
        return [*self._in_order]

    @property
    def running(self) -> list[Sequence]:
        """Those that take part in rounds, in the order of their arrival. Not to be changed, and never changed later."""
        return self._with(Status.RUNNING)

    @property
    def extending(self) -> list[Sequence]:
        """Those whose prompts are being extended, likewise."""
        return self._with(Status.EXTENDING)

    def _with(self, status: Status) -> list[Sequence]:
        """Asked for several times a round, while it changes once in many."""
        if status not in self._by_status:
            self._by_status[status] = [s for s in self._in_order if s.status is status]
        return self._by_status[status]

    def _changed(self) -> None:
        self.changes += 1
        self._by_status.clear()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self._in_order

    def submit(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    # -- admission

    def check_fits(self, seq: Sequence) -> None:
        """Raises ValueError if `seq` could never run: longer than a row, or than the pool."""
        if not 0 < seq.prompt_len < seq.limit:
            raise ValueError(
                f"prompt: expected 1 to {self.rows.max_len - 1} tokens, so that one more has a position, "
                f"got {seq.prompt_len}"
            )
        capacity = self.pool.num_blocks * self.pool.block_size
        if seq.limit - 1 > capacity:
            raise ValueError(
                f"prompt: {seq.prompt_len} tokens and up to {seq.limit - seq.prompt_len} more need {seq.limit - 1} KV "
                f"slots, expected at most {capacity}, the pool's; lower max_tokens or raise kv_memory"
            )

    def admit(self, in_flight: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Give waiting sequences rows and blocks, first come first served. Returns blocks to copy (copy on write).

        A sequence that another one is about to help, its parent or a prompt with the same beginning, lets others pass.
        One whose last round is not read yet keeps its place: what it emitted there is still to come.
        """
        copies: list[tuple[int, int]] = []
        if not self.waiting:
            return copies
        unread, passed = set(in_flight), []
        filling = {key for s in self.placed if s and s.status is Status.EXTENDING for key in s.keys[s.num_published :]}
        while self.waiting and None in self.placed:
            seq = self.waiting.popleft()
            if seq not in unread and self._helped_soon(seq, filling):
                passed.append(seq)
                continue
            if seq in unread or not self._place(seq, copies):
                self.waiting.appendleft(seq)
                break
            filling.update(seq.keys[seq.num_published :])
        self.waiting.extendleft(reversed(passed))
        return copies

    def _helped_soon(self, seq: Sequence, filling: set[bytes]) -> bool:
        parent = seq.parent
        if parent and parent.status in (Status.WAITING, Status.EXTENDING) and seq.stats.preemptions == 0:
            return True
        self._extend_keys(seq)
        first_missing = next((key for key in seq.keys if not self.pool.allocator.is_cached(key)), None)
        return first_missing in filling

    def _place(self, seq: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Row and blocks for `seq`, or False and nothing changed."""
        table = self._fork(seq, copies) or self._from_prefix(seq)
        # Leave the running rows a block each to grow into, or admitting this one would soon preempt it.
        spare = len(self.running)
        needed = -(-len(seq) // table.block_size) - len(table.blocks)
        if needed + spare > self.pool.allocator.num_free or not table.grow(len(seq)):
            if copies and copies[-1][1] in table.blocks:
                copies.pop()
            table.release()
            seq.target_len = seq.drafter_len = seq.num_published = 0
            return False
        seq.table, seq.status, seq.row = table, Status.EXTENDING, self.placed.index(None)
        seq.stats.cached_tokens = seq.target_len
        self.placed[seq.row] = seq
        insort(self._in_order, seq, key=lambda s: s.id)
        self._changed()
        return True

    def _fork(self, seq: Sequence, copies: list[tuple[int, int]]) -> BlockTable | None:
        """Share the prompt of a running parent; the block that both would write into is copied."""
        parent, known = seq.parent, seq.prompt_len - 1
        if parent is None or parent.status is not Status.RUNNING or len(seq) != seq.prompt_len or known == 0:
            return None
        table = parent.table.fork(known)
        if known % table.block_size:
            if self.pool.allocator.num_free == 0:
                table.release()
                return None
            pair = table.make_writable(known - 1)
            if pair:
                copies.append(pair)
        self._extend_keys(seq)
        seq.target_len, seq.drafter_len = known, min(parent.drafter_len, known)
        seq.num_published, seq.scores = known // table.block_size, parent.scores
        return table

    def _from_prefix(self, seq: Sequence) -> BlockTable:
        """A table that begins with what is cached of the sequence's tokens."""
        table = self.pool.new_table()
        if not seq.unscored:
            table.blocks += self.pool.allocator.lookup(self._extend_keys(seq))
        seq.target_len, seq.drafter_len, seq.num_published = table.num_slots, 0, len(table.blocks)
        return table

    def _extend_keys(self, seq: Sequence) -> list[bytes]:
        size = self.pool.block_size
        if len(seq.keys) < (len(seq) - 1) // size:
            prefix_keys(seq.token_ids, size, upto=len(seq) - 1, salt=self.salt, keys=seq.keys)
        return seq.keys

    # -- extending prompts, and drafters that lag

    def target_chunks(self) -> list[Chunk]:
        """What of the prompts to run next, at most `prompt_budget` tokens."""
        chunks, budget = [], self.prompt_budget
        for seq in self.extending:
            if budget and seq.target_len < len(seq) - 1:
                end = min(seq.target_len + budget, len(seq) - 1)
                chunks.append(Chunk(seq, seq.target_len, end))
                budget -= end - seq.target_len
        return chunks

    def drafter_chunks(self, seqs: Iterable[Sequence]) -> list[Chunk]:
        """What the drafter's KV of `seqs` lacks, at most `prompt_budget` tokens.

        A block that several sequences share is filled once: what another chunk of this forward writes is left to it.
        """
        if not self.has_drafter:
            return []
        chunks: list[Chunk] = []
        budget, writing = self.prompt_budget, set[int]()
        for seq in seqs:
            known = seq.target_len if seq.status is Status.EXTENDING else len(seq) - 1
            if seq.drafter_len >= known:
                continue
            self._skip_complete(seq, known)
            end = self._free_of(writing, seq, min(known, seq.drafter_len + budget))
            if end > seq.drafter_len:
                chunks.append(Chunk(seq, seq.drafter_len, end))
                budget -= end - seq.drafter_len
        return chunks

    def _skip_complete(self, seq: Sequence, known: int) -> None:
        size, blocks, allocator = self.pool.block_size, seq.table.blocks, self.pool.allocator
        while seq.drafter_len % size == 0 and seq.drafter_len + size <= known:
            if not allocator.is_complete(DRAFTER, blocks[seq.drafter_len // size]):
                break
            seq.drafter_len += size

    def _free_of(self, writing: set[int], seq: Sequence, end: int) -> int:
        size = self.pool.block_size
        for i in range(seq.drafter_len // size, -(-end // size)):
            if seq.table.blocks[i] in writing:
                return min(end, max(i * size, seq.drafter_len))
            writing.add(seq.table.blocks[i])
        return end

    def rests(self, seq: Sequence) -> bool:
        """Whether the drafter need not keep up with `seq`."""
        return seq.params.k == 0 or seq in self.resting

    def ready(self, seq: Sequence) -> bool:
        """Whether an extending sequence has all the KV that its first round needs."""
        known = len(seq) - 1
        drafter = not self.has_drafter or self.rests(seq) or seq.drafter_len >= known
        return seq.status is Status.EXTENDING and seq.target_len >= known and drafter

    def join(self, seq: Sequence, k: int) -> None:
        seq.status = Status.RUNNING
        self._changed()
        self.rows.join(seq.row, seq, k)

    def publish(self, seq: Sequence) -> None:
        """Make the full blocks of `seq` findable, as far as their KV is there and their tokens are final."""
        size, allocator = self.pool.block_size, self.pool.allocator
        upto = seq.target_len if seq.status is Status.EXTENDING else len(seq.token_ids) - 1
        if not self.has_drafter and upto < (seq.num_published + 1) * size:
            return  # the common case of a round
        keys, blocks = self._extend_keys(seq), seq.table.blocks
        for i in range(seq.num_published, upto // size):
            allocator.publish(blocks[i], keys[i])
        seq.num_published = max(seq.num_published, upto // size)
        if self.has_drafter:
            for i in range(seq.num_complete, min(seq.drafter_len, upto) // size):
                allocator.mark_complete(DRAFTER, blocks[i])
                seq.num_complete = i + 1

    # -- slots for the next round

    def reserve(self, slots: dict[Sequence, int]) -> None:
        """Grow the tables of running rows to `slots` positions, as far as blocks last.

        If a row lacks a slot for its newest known token, drafts give way first, then the youngest sequence.
        """
        size = self.pool.block_size
        short = [seq for seq in self.running if slots.get(seq, 0) > len(seq.table.blocks) * size]  # few, in most rounds
        for seq in short:
            if seq.row is None:
                continue  # preempted by an older one in this very loop
            wanted = min(slots[seq], seq.limit - 1)
            held = len(seq.table.blocks)
            if seq.table.grow_upto(wanted):
                self.rows.set_table(seq.row, seq.table.blocks, unchanged=held)
            while seq.row is not None and seq.table.num_slots < min(len(seq), seq.limit - 1):
                if not self._shrink(slots):
                    self.preempt(self._in_order[-1])
                if seq.row is not None and seq.table.grow(len(seq)):
                    self.rows.set_table(seq.row, seq.table.blocks)

    def _shrink(self, slots: dict[Sequence, int]) -> bool:
        """Take back blocks that rows hold beyond what they need now; True if any came free."""
        freed = False
        for seq in self.running:
            if seq.table.truncate(max(slots.get(seq, len(seq)), len(seq))):
                self.rows.set_table(seq.row, seq.table.blocks)
                freed = True
        return freed

    # -- leaving

    def preempt(self, seq: Sequence) -> None:
        """Take row and blocks from `seq`; it is extended again later, before those that came after it."""
        self.preemptions += 1
        seq.stats.preemptions += 1
        self.release(seq)
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)

    def release(self, seq: Sequence, *, publish: bool = True) -> None:
        """Give back the row and the blocks of `seq`, in stream order: first the row stops, then the blocks are free."""
        if seq.row is not None:
            if seq.status is Status.RUNNING:
                if publish:
                    self.publish(seq)
                self.rows.leave(seq.row)
            self.placed[seq.row] = None
            self._in_order.remove(seq)
            self._changed()
            seq.table.release()
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.resting.discard(seq)
        seq.row = seq.table = None
        seq.target_len = seq.drafter_len = seq.num_published = seq.num_complete = 0

    # -- invariants (design section 6)

    def check(self) -> None:
        """Assert what must hold between steps; raises AssertionError naming what is broken."""
        seqs, allocator = self.sequences, self.pool.allocator
        allocator.check([seq.table.blocks for seq in seqs])
        for seq in seqs:
            assert seq.target_len <= len(seq) - 1 + (seq.status is Status.RUNNING), "the newest token has KV"
            assert self.placed[seq.row] is seq, f"row {seq.row} is not its sequence's"
            for block in seq.table.blocks[seq.num_published :]:
                assert allocator.ref_count(block) == 1 or seq.status is Status.EXTENDING, "a shared tail"
        for seq in self.waiting:
            assert seq.table is None and seq.row is None, "a waiting sequence owns blocks"
