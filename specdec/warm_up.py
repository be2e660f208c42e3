"""Warming up: rounds over random text before the first request, so that graphs are there and times are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import torch

from specdec.draft import LookupDrafter
from specdec.engine import Engine
from specdec.policy import Policy, ladder
from specdec.round import RoundShape
from specdec.sampling import SamplingParams
from specdec.sequence import Sequence
from specdec.stats import EngineStats

_CONTEXT = 256
"""Tokens of each prompt at most: what a round takes grows with its context."""
_ROUNDS = 4
"""Of each shape: one to capture it, two that a plain round's time needs, and one in flight."""


def batches(wish: bool | list[int], max_rows: int) -> list[int]:
    """Numbers of rows to warm up for, rising: all powers of two up to `max_rows` for True, none for False.

    Raises TypeError or ValueError for a list that holds anything but numbers of rows.
    """
    if isinstance(wish, bool):
        return sorted({min(1 << i, max_rows) for i in range(max_rows.bit_length() + 1)}) if wish else []
    if not isinstance(wish, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in wish):
        raise TypeError(f"warm_up: expected a bool or a list of numbers of rows, got {wish!r}")
    if any(not 0 < n <= max_rows for n in wish):
        raise ValueError(f"warm_up: expected numbers from 1 to max_rows, {max_rows}, got {list(wish)}")
    return sorted(set(wish))


def warm_up(engine: Engine, rows: list[int], kinds: list[SamplingParams]) -> None:
    """Run every shape that rounds of so many rows may have.

    kinds: parameters of requests, of which shapes depend on whether they draw with noise and with filters. The engine
    keeps graphs, compiled layers and the costs that its policy has measured; cached prefixes and counters are dropped, and
    so is what was learnt of drafts, since those of random text say nothing.
    Raises RuntimeError if a round failed, or if `engine` has something to do.
    """
    if not engine.idle:
        raise RuntimeError("warm_up: requests are running; warm up before the first one")
    with engine.graphs.buckets.eagerly() if engine.graphs else nullcontext():
        for n, kind in product(rows, kinds):
            for steps, bucket in _shapes(engine, n):
                _decode(engine, _sequences(engine, n, steps, n * bucket, kind))
            _capture_buckets(engine, n, kind)
    engine.pool.allocator.reset_prefix_cache()
    engine.stats = EngineStats()
    for group in engine.groups:
        if group.policy:
            group.policy = Policy(engine.config.k, stepped=group.policy.stepped, costs=group.policy.costs)


def _shapes(engine: Engine, n: int) -> Iterator[tuple[int, int]]:
    """(draft steps, drafts per row) of rounds of n rows, one after the other: what comes may depend on earlier times."""
    k, policy = engine.config.k if engine.drafter else 0, engine.whole.policy
    if not policy:
        yield k, k
        return
    yield 0, 0
    if not policy.stepped:
        yield k, k
        return
    seen = set()
    while left := [shape for shape in policy.shapes(n) if shape not in seen]:
        seen.add(left[0])
        yield left[0]


def _sequences(engine: Engine, n: int, steps: int, drafts: int, kind: SamplingParams) -> list[Sequence]:
    """n prompts, the same ones for every shape; the first of them draft, `drafts` in all. None where they don't fit the
    pool: so many rows never run at once.
    """
    room = min(engine.pool.num_blocks // n * engine.pool.block_size, engine.rows.max_len)
    new = min((_ROUNDS + 1) * (engine.config.k + 1), room // 2)
    length = min(_CONTEXT, room - new)
    vocab_size = min(model.vocab_size for model in (engine.target, engine.draft_model) if model)
    ids = torch.randint(vocab_size, (n, length), generator=torch.Generator().manual_seed(0)).tolist()
    seqs = []
    for prompt in ids if new else []:
        k = min(steps, drafts)
        drafts -= k
        seqs.append(Sequence(prompt, replace(kind, k=k), limit=length + new))
    return seqs


def _decode(engine: Engine, seqs: list[Sequence]) -> None:
    """Take in the prompts first, so that all rows join at once; then a few rounds of all of them."""
    for seq in seqs:
        engine.submit(seq)
    while any(seq.row is None or not engine.scheduler.ready(seq) for seq in seqs):
        engine.take_in()
        _check(seqs)
    for _ in range(_ROUNDS):
        engine.step()
    for seq in seqs:
        engine.cancel(seq)
    engine.run()
    _check(seqs)


def _check(seqs: list[Sequence]) -> None:
    error = next((seq.error for seq in seqs if seq.error), None)
    if error:
        raise RuntimeError(f"warm_up: a round of {len(seqs)} rows failed: {error!r}") from error


def _capture_buckets(engine: Engine, n: int, kind: SamplingParams) -> None:
    """Of a drafter that paces itself, which finds nothing in random text: by padding alone."""
    if engine.graphs and isinstance(engine.drafter, LookupDrafter):
        for bucket in (0, *ladder(engine.config.k)):
            shape = RoundShape(engine.config.k, n * (1 + bucket), kind.noise, kind.filters)
            engine.graphs.run([-1] * n, shape)
