"""The round's small kernels in the interpreter: the same numbers as their twins, for every kind of row at once."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels import round as kernels
from specdec.kernels.backend import interpreted
from specdec.kernels.columns import RowState, Settled

BLOCK_SIZE, WIDTH, VOCAB = 3, 5, 50
MAX_LEN = BLOCK_SIZE * WIDTH


def rows(batch, generator, device="cpu"):
    """A view of `batch` rows of batch + 2, in shuffled order; some stopped, some without room, some padding."""
    total = batch + 3
    draw = lambda high, *size: torch.randint(0, high, size, generator=generator)  # noqa: E731
    table = torch.randperm(total * WIDTH, generator=generator).view(total, WIDTH).int()
    table[torch.arange(WIDTH) >= draw(WIDTH + 1, total)[:, None]] = -1  # reservations of any length
    num_tokens = 1 + draw(MAX_LEN, total)
    state = RowState(num_tokens, (num_tokens - 1 - draw(4, total)).clamp(min=0), draw(4, total) > 0)
    state.active[-1] = False
    ints, floats = draw(9, 13, total), torch.rand(3, total, generator=generator)
    ints[1] = num_tokens + draw(5, total)  # limit
    history = draw(VOCAB, total, MAX_LEN + 1).int()
    index = torch.randperm(total - 1, generator=generator)[:batch]
    index[draw(5, batch) == 0] = -1
    moved = [x.to(device) for x in (*state, ints, floats, table, history, index)]
    return SimpleNamespace(
        state=RowState(*moved[:3]), ints=moved[3], floats=moved[4], table=moved[5], history=moved[6], index=moved[7]
    )


def view_of(r, gathered):
    columns, active, _, tables = gathered
    return SimpleNamespace(
        index=columns[0], num_tokens=columns[1], drafter_len=columns[2], k=columns[3], limit=columns[4], active=active,
        block_table=tables, all_tokens=r.history, block_size=BLOCK_SIZE, max_len=MAX_LEN,
    )  # fmt: skip


def whole_round(batch, k, tokens, seed, device="cpu"):
    """Every kernel in the order of a round with random drafts and decisions; everything that they give, by name."""
    generator = torch.Generator().manual_seed(seed)
    r = rows(batch, generator, device)
    draw = lambda low, high, *size: torch.randint(low, high, size, generator=generator).to(device)  # noqa: E731
    found = {"gather": kernels.gather_rows(r.index, r.state, r.ints, r.floats, r.table)}
    view = view_of(r, found["gather"])
    running, want = found["room"] = kernels.room(view, k)
    counts, depth = found["depth"] = kernels.draft_depth(view, running, want, 2)
    found["step 0"] = kernels.draft_step(view, depth, None, 0, 2, VOCAB - 9)
    drafts = draw(-1, VOCAB + 5, k, batch).t()  # as a draft model leaves them: a row a step
    for j in range(1, k):
        found[f"step {j}"] = kernels.draft_step(view, depth, drafts.t()[j - 1], j, 2, VOCAB - 9)
    counts = found["legal"] = kernels.legal(drafts, draw(-1, k + 2, batch), want, VOCAB)
    scores = draw(0, 4, batch, k).float()
    scores[draw(0, 7, batch, k) == 0] = float("nan")
    scores[draw(0, 7, batch, k) == 0] = -torch.inf
    room_left = max(tokens, int(running.sum()))
    num_drafts = found["grant"] = kernels.grant(counts, scores, running, room_left)
    assert int((num_drafts + running).sum()) <= room_left
    found["pack"] = kernels.pack(view, running, drafts, num_drafts, max(1, room_left))
    emitted = torch.where(running, torch.minimum(draw(0, k + 2, batch), num_drafts + 1), 0)
    emitted = torch.minimum(emitted, view.limit - view.num_tokens).clamp(min=0)
    emitted = torch.minimum(emitted, MAX_LEN - view.num_tokens)
    flags = draw(0, 2, 2, batch) > 0
    settled = Settled(
        draw(0, VOCAB, batch, k + 1), emitted, num_drafts, num_drafts, counts, running, flags[0], flags[1],
        depth if seed % 2 else None,
    )  # fmt: skip
    found["settle"] = kernels.settle(r.state, view, settled)
    found["rows"] = (*r.state, r.history[:, :MAX_LEN])
    return found


def assert_same(got, want):
    for name in want:
        pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got[name], want[name])), strict=True)
        for i, (a, b) in enumerate(pairs):
            assert a.dtype == b.dtype, (name, i)
            assert torch.equal(a.cpu(), b.cpu()), (name, i, a, b)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batch=st.sampled_from([1, 2, 5, 33]), k=st.integers(1, 4), share=st.floats(0, 1), seed=st.integers(0, 999))
def test_kernels_give_what_their_twins_give(batch, k, share, seed):
    tokens = int(share * batch * (k + 1))
    want = whole_round(batch, k, tokens, seed)
    with interpreted():
        got = whole_round(batch, k, tokens, seed)
    assert_same(got, want)


def test_a_row_stalls_without_a_slot_for_its_newest_token():
    view = SimpleNamespace(
        index=torch.arange(3), num_tokens=torch.tensor([4, 3, 1]), active=torch.ones(3, dtype=torch.bool),
        limit=torch.tensor([9, 9, 9]), k=torch.tensor([5, 5, 0]), block_size=3, max_len=15,
        block_table=torch.tensor([[7, -1], [7, -1], [7, 8]]).int(),
    )  # fmt: skip
    running, want = kernels.room(view, 5)
    assert running.tolist() == [False, True, True]
    assert want.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("l", "limit", "k", "draft_steps", "want"), [
    (5, 15, 9, 9, 7),  # blocks: 12 slots, l - 1 = 4 taken, one for the newest
    (5, 8, 9, 9, 2),  # the limit: the bonus token takes the last place
    (5, 6, 9, 9, 0),
    (5, 15, 3, 9, 3),
    (5, 15, 9, 1, 1),
])  # fmt: skip
def test_drafts_end_where_the_row_does(l, limit, k, draft_steps, want):
    one = lambda x: torch.tensor([x])  # noqa: E731
    view = SimpleNamespace(
        index=one(0), num_tokens=one(l), active=one(True), limit=one(limit), k=one(k), block_size=3, max_len=15,
        block_table=torch.tensor([[1, 2, 3, 4, -1]]).int(),
    )  # fmt: skip
    assert kernels.room(view, draft_steps)[1].tolist() == [want]
