"""Look-up drafting: how much is drafted, and with which scores. What matches is the kernel's test."""

from types import SimpleNamespace

import pytest
import torch
from support import Request, engine, params, submit

from specdec.draft import DraftRows, LookupDrafter


def propose(drafter, texts, k):
    """What `drafter` proposes for rows that hold `texts`; the histories past their ends are garbage."""
    lengths = torch.tensor([len(t) for t in texts])
    history = torch.full((len(texts), max(map(len, texts)) + 3), 77, dtype=torch.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    want, running = torch.full_like(lengths, k), torch.ones_like(lengths, dtype=torch.bool)
    view = SimpleNamespace(history=history, num_tokens=lengths)  # all that look-up reads
    return drafter.propose(DraftRows(view, running, want), k)


def matches(lengths):
    """Texts whose last n tokens occur before, followed by 50, 51, ..., for each n of `lengths`."""
    return [[*range(10, 10 + n), *range(50, 66), 200 + n, *range(10, 10 + n)] for n in lengths]


def test_how_much_is_drafted_grows_with_the_match():
    found = [propose(LookupDrafter(token_cost=0.05), [text], 15) for text in matches([1, 2, 3, 4, 8, 16])]
    counts = [int(draft.counts) for draft in found]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (3, 15)
    for draft, count in zip(found, counts, strict=True):
        assert draft.token_ids[0, :count].tolist() == list(range(50, 66))[:count]
    assert propose(LookupDrafter(min_match=4, token_cost=0), matches([1, 3, 4, 5]), 6).counts.tolist() == [0, 0, 6, 6]


@pytest.mark.parametrize("cost", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_a_draft_pays_or_is_not_made(cost, batch):
    """Exactly the drafts whose survival is at least c / (1 + c), with c the cost of a token for all rows together."""
    draft = propose(LookupDrafter(token_cost=cost), matches([2] * batch), 9)
    least = batch * cost / (1 + batch * cost)
    want = [sum(0.43 * 0.6**j >= least for j in range(9))] * batch
    assert draft.counts.tolist() == want


def test_longer_matches_than_measured_count_as_the_longest():
    draft = propose(LookupDrafter(max_match=30, token_cost=0.1), matches([16, 17, 30]), 4)
    assert (draft.scores == draft.scores[0]).all()


def test_scores_fall_along_a_row_and_rise_with_the_match():
    texts = [[1, 2, 9, 1, 2], [1, 2, 3, 4, 9, 1, 2, 3, 4]]
    scores = propose(LookupDrafter(), texts, 5).scores
    assert scores.shape == (2, 5)
    assert (scores[:, 1:] < scores[:, :-1]).all()
    assert (scores[1] > scores[0]).all()


@pytest.mark.parametrize("text", [[5], [5, 6], list(range(30))])
def test_open_text_drafts_nothing(text):
    assert propose(LookupDrafter(), [text], 4).counts.tolist() == [0]


@pytest.mark.parametrize("name", ["max_match", "min_match"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None, "2"])
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected an int of at least 1, got"):
        LookupDrafter(**{name: value})


@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_bad_cost_is_named(value):
    with pytest.raises(ValueError, match="token_cost: expected None or a number of at least 0, got"):
        LookupDrafter(token_cost=value)


def test_open_text_costs_what_plain_decoding_costs():
    """No row wants a draft, so no forward is wider than plain decoding's."""
    e = engine(drafter="none", k=4)
    e.drafter = e.round.drafter = LookupDrafter(min_match=6)
    widths, extend = [], e.target.extend
    e.target.extend = lambda packed, **kw: widths.append(len(packed.token_ids)) or extend(packed, **kw)
    submit(e, [Request([11, 3, 4, 60, 61], 12, params(1.0, seed=3, k=4))])
    e.run()
    assert widths == [4] + [1] * 12
