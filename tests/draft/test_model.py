"""The draft model's steps: what it runs, what it writes, and what it draws, beside a draft loop without any cache."""

import pytest
import torch
from support import Request, engine, params, submit
from watch import TWINS, Watch, draw

from specdec.draft import DraftRows


def started(kind="near", lengths=(9, 4, 1), temperature=1.0, steps=1):
    """An engine whose rows have joined and have run `steps` rounds, and their requests."""
    e = engine(drafter=kind, k=3, budget=100)
    each = [
        Request([(5 * i + j) % 97 for j in range(n)], 20, params(temperature, seed=i, k=3))
        for i, n in enumerate(lengths)
    ]
    submit(e, each)
    for _ in range(steps):
        e.step()
    return e, each


def rows_of(e, each, want):
    view = e.rows.view(torch.tensor([r.seq.row for r in each]))
    running = torch.ones(len(each), dtype=torch.bool)
    return DraftRows(view, running, torch.tensor(want))


def written(e, call):
    """The drafter's slots that `call` writes, in order, and its result."""
    slots, extend = [], e.drafter.model.extend

    def watched(packed, **options):
        slots.append(packed.slot_mapping[packed.slot_mapping >= 0].tolist())
        return extend(packed, **options)

    e.drafter.model.extend = watched
    try:
        return call(), slots
    finally:
        e.drafter.model.extend = extend


def slot(seq, position):
    return seq.table.blocks[position // 4] * 4 + position % 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("kind", ["same", "near", "random"])
def test_drafts_are_those_of_a_loop_without_a_cache(kind, steps, temperature):
    e, each = started(kind, temperature=temperature, steps=steps)
    e.scheduler.reserve({r.seq: len(r.seq) + 3 for r in each})
    draft = e.drafter.propose(rows_of(e, each, [3, 3, 3]), 3)
    for request, tokens in zip(each, draft.token_ids.tolist(), strict=True):
        now = list(request.seq.token_ids)
        for _ in range(3):
            now.append(draw(TWINS[kind], tuple(now), temperature, request.seq.seed))
        assert tokens == now[-3:]
    assert draft.counts.tolist() == draft.written.tolist() == [3, 3, 3]


def test_step_0_writes_what_is_missing_and_no_more():
    """One token behind after a full acceptance, or none: never a position below drafter_len."""
    e, each = started("same", steps=2)
    e.scheduler.reserve({r.seq: len(r.seq) + 3 for r in each})
    behind = [len(r.seq) - 1 - r.seq.drafter_len for r in each]
    _, slots = written(e, lambda: e.drafter.propose(rows_of(e, each, [3, 3, 3]), 3))
    first = [slot(r.seq, p) for r in each for p in range(r.seq.drafter_len, len(r.seq))]
    assert max(behind) == 1
    assert slots[0] == first
    assert slots[1:] == [[slot(r.seq, len(r.seq) + j) for r in each] for j in range(2)]


def test_a_row_that_wants_nothing_is_kept_warm():
    e, each = started()
    e.scheduler.reserve({r.seq: len(r.seq) + 3 for r in each})
    draft, slots = written(e, lambda: e.drafter.propose(rows_of(e, each, [0, 2, 0]), 3))
    assert draft.counts.tolist() == [0, 2, 0]
    assert draft.written.tolist() == [1, 2, 1]
    assert all(slot(r.seq, len(r.seq) - 1) in slots[0] for r in each)
    assert slots[1:] == [[slot(each[1].seq, len(each[1].seq))], []]


def test_a_row_out_of_step_or_not_running_drafts_and_writes_nothing():
    e, each = started()
    e.scheduler.reserve({r.seq: len(r.seq) + 3 for r in each})
    rows = rows_of(e, each, [3, 3, 3])
    rows.view.drafter_len[0] = len(each[0].seq) - 3
    rows.running[1] = False
    draft, slots = written(e, lambda: e.drafter.propose(rows, 3))
    assert draft.counts.tolist() == draft.written.tolist() == [0, 0, 3]
    own = set(each[2].seq.table.blocks)
    assert {s // 4 for step in slots for s in step} <= own


def test_nan_logits_of_the_drafter_are_no_failure():
    """Its drafts are then whatever; the target decides."""
    e, each = started("near", lengths=(9, 4))
    watch = Watch(e, "another")
    watch.failing = lambda when, name, packed, value: (
        value.fill_(float("nan")) if name == "drafter" and when == "after" else value
    )
    e.run()
    assert all(r.seq.token_ids == r.want for r in each)
    assert e.drafter is not None
