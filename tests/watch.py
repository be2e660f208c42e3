"""What no engine may do, watched while it runs: every forward, every round and every published block is looked at."""

from __future__ import annotations

import functools
from collections.abc import Generator

import torch
from support import tiny

from specdec.draft import ModelDrafter
from specdec.engine import Engine
from specdec.kernels import Sampling, sample
from specdec.limits import max_positions
from specdec.model import Packed, PagedModel
from specdec.round import Counts, RoundResult
from specdec.sequence import Sequence

TWINS = {"same": ("llama", 0, 0.0, 2), "near": ("llama", 0, 0.01, 2), "random": ("llama", 5, 0.0, 1)}
"""Arguments of `tiny` for each kind of draft model that `support.engine` makes, for the target "llama"."""


@functools.lru_cache(None)
def logits_after(model: tuple, tokens: tuple[int, ...]) -> torch.Tensor:
    """[1, vocab] logits after `tokens`, without any cache."""
    with torch.inference_mode():
        return tiny(*model)(torch.tensor([tokens]), use_cache=False).logits[0, -1:]


@functools.lru_cache(None)
def kv_of(model: tuple, tokens: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer, transformers' own keys and values [len(tokens), heads, dim]."""
    with torch.inference_mode():
        layers = tiny(*model)(torch.tensor([tokens]), use_cache=True).past_key_values.layers
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in layers]


@functools.lru_cache(None)
def draw(model: tuple, tokens: tuple[int, ...], temperature: float, seed: int) -> int:
    """The token that `model` draws after `tokens`."""
    columns = Sampling(*(torch.tensor([v]) for v in (temperature, 0, 1.0, 0.0, seed)))
    return int(sample(logits_after(model, tokens), torch.tensor([len(tokens)]), columns)[0])


class Watch:
    """Wraps the engine's models, round and allocator. `full`: what plain decoding gives, per sequence.

    drafter: the kind of `support.engine`; of another one only the forwards are looked at. `failing`, if set, is called
    with ("before" | "after", model, packed, logits) and may raise, or change the logits. Checks invariants 3, 4, 5 and
    7 of the design, raising AssertionError.
    """

    def __init__(self, engine: Engine, drafter: str):
        self.engine, self.full, self.failing = engine, {}, None
        self.twins = {"target": ("llama", 0, 0.0, 2)}
        self.error: AssertionError | None = None
        self.rounds: list[dict] = []
        self._sealed: dict[tuple[str, int], tuple] = {}
        self._watch_model(engine.target)
        if isinstance(engine.drafter, ModelDrafter):
            self.twins.update({"drafter": TWINS[drafter]} if drafter in TWINS else {})
            self._watch_model(engine.drafter.model)
        self._stages, engine.round.stages = engine.round.stages, self._round
        allocator = engine.pool.allocator
        self._evict, allocator._evict = allocator._evict, self._forget_evicted
        self._reset, allocator.reset_prefix_cache = allocator.reset_prefix_cache, self._forget_all

    # -- forwards

    def _watch_model(self, model: PagedModel) -> None:
        extend = model.extend

        def watched(packed: Packed, *, logits: bool = True) -> torch.Tensor | None:
            try:
                self._check_forward(model, packed)
            except AssertionError as error:
                self.error = self.error or error  # the engine would take it for a failure of the forward
            if self.failing:
                self.failing("before", model.name, packed, logits)
            out = extend(packed, logits=logits)
            return self.failing("after", model.name, packed, out) if self.failing and logits else out

        model.extend = watched

    def _check_forward(self, model: PagedModel, packed: Packed) -> None:
        pool, name = self.engine.pool, model.name
        slots = packed.slot_mapping[packed.slot_mapping >= 0].tolist()
        assert len(set(slots)) == len(slots), f"{name}: a slot has two writers"
        assert max(slots, default=0) < pool.num_blocks * pool.block_size
        assert 0 <= int(packed.token_ids.min()) <= int(packed.token_ids.max()) < model.vocab_size, name
        assert 0 <= int(packed.positions.min()), name
        assert int(packed.positions.max()) < (max_positions(model.model) or 1 << 30), f"{name}: no such position"
        for block in {slot // pool.block_size for slot in slots}:
            shared = pool.allocator.ref_count(block) > 1 or pool.allocator.is_published(block)
            assert pool.allocator.ref_count(block) > 0, f"{name} writes to free block {block}"
            complete = name == "target" or pool.allocator.is_complete(name, block)
            assert not (shared and complete), f"{name} rewrites block {block}, which is shared and complete"

    # -- rounds

    def _round(self, index: torch.Tensor, shape) -> Generator[None, None, RoundResult]:
        rows = self.engine.rows
        before = {r: rows.history[r, : rows.num_tokens[r]].tolist() for r in index.tolist()}
        result = yield from self._stages(index, shape)
        for row, values in zip(index.tolist(), result.values.tolist(), strict=True):
            counts = Counts._make(values[: len(Counts._fields)])._asdict()
            self.rounds.append({"row": row, **counts})
            try:
                self._check_drafts(self.engine.scheduler.placed[row], before[row], counts)
            except AssertionError as error:
                self.error = self.error or error
        return result

    def _check_drafts(self, seq: Sequence, tokens: list[int], counts: dict[str, int]) -> None:
        """Invariant 7: as many drafts are accepted as of a draft loop without any cache."""
        if "drafter" not in self.twins or seq not in self.full or counts["failed"] or not counts["ran"]:
            return
        full, accepted, now = self.full[seq], 0, list(tokens)
        assert now == full[: len(now)], "the history is not what plain decoding gives"
        while accepted < counts["num_drafts"]:
            drawn = draw(self.twins["drafter"], tuple(now), seq.params.temperature, seq.seed)
            if drawn != full[len(now)]:
                break
            now.append(drawn)
            accepted += 1
        assert counts["num_accepted"] == accepted, f"stale drafter KV: {counts}, without a cache {accepted} accepted"
        if self.twins["drafter"] == self.twins["target"]:
            assert accepted == counts["num_drafts"], "a copy of the target drafted a wrong token"

    # -- published blocks

    def _forget_evicted(self) -> int:
        block = self._evict()
        for name in self.twins:
            self._sealed.pop((name, block), None)
        return block

    def _forget_all(self) -> None:
        self._sealed.clear()
        self._reset()

    def check(self) -> None:
        """To be called between steps. Published, complete blocks hold what a forward without a cache gives, for ever."""
        if self.error:
            raise self.error
        self.engine.scheduler.check()
        for seq in self.full:
            self._check_sequence(seq)
            for i, key in enumerate(seq.keys):
                self._check_block(key, tuple(seq.token_ids[: (i + 1) * self.engine.pool.block_size]))

    def _check_sequence(self, seq: Sequence) -> None:
        assert seq.token_ids == self.full[seq][: len(seq)], "not what plain decoding gives"
        size = self.engine.pool.block_size
        if seq.table is not None and (len(seq) - 1) // size < len(seq.table.blocks):
            newest = seq.table.blocks[(len(seq) - 1) // size]
            assert not self.engine.pool.allocator.is_published(newest), "the block of the newest token is published"

    def _check_block(self, key: bytes, tokens: tuple[int, ...]) -> None:
        pool = self.engine.pool
        block = pool.allocator._block_of.get(key)
        if block is None:
            return
        for name, twin in self.twins.items():
            if name != "target" and not pool.allocator.is_complete(name, block):
                continue
            content = torch.cat([t[block].flatten() for pair in pool.kv(name) for t in pair])
            if (name, block) not in self._sealed:
                wanted = [t[-pool.block_size :].flatten() for pair in kv_of(twin, tokens) for t in pair]
                torch.testing.assert_close(content, torch.cat(wanted), rtol=1e-3, atol=1e-3)
                self._sealed[name, block] = key, content
            assert self._sealed[name, block][0] == key
            assert torch.equal(self._sealed[name, block][1], content), f"{name}: published block {block} was rewritten"
