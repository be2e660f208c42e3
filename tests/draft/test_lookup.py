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


def test_how_much_is_drafted_grows_with_the_match():
    """A match of n >= min_match tokens drafts (n - min_match + 1) * growth of them, at most k."""
    texts = [[*range(10, 10 + n), 50, 51, 52, 53, 54, 55, 56, 57, 90 + n, *range(10, 10 + n)] for n in range(1, 6)]
    draft = propose(LookupDrafter(min_match=2, growth=2), texts, 7)
    assert draft.counts.tolist() == [0, 2, 4, 6, 7]
    for n, tokens, count in zip(range(1, 6), draft.token_ids.tolist(), draft.counts.tolist(), strict=True):
        assert tokens[:count] == [50, 51, 52, 53, 54, 55, 56][:count], n
    assert propose(LookupDrafter(min_match=1, growth=1), texts, 7).counts.tolist() == [1, 2, 3, 4, 5]
    assert propose(LookupDrafter(min_match=4, growth=3), texts, 7).counts.tolist() == [0, 0, 0, 3, 6]


def test_scores_fall_along_a_row_and_rise_with_the_match():
    texts = [[1, 2, 9, 1, 2], [1, 2, 3, 4, 9, 1, 2, 3, 4]]
    scores = propose(LookupDrafter(), texts, 5).scores
    assert scores.shape == (2, 5)
    assert (scores[:, 1:] < scores[:, :-1]).all()
    assert (scores[1] > scores[0]).all()


@pytest.mark.parametrize("text", [[5], [5, 6], list(range(30)), [1, 2, 3, 4, 1]])
def test_open_text_drafts_nothing(text):
    assert propose(LookupDrafter(), [text], 4).counts.tolist() == [0]


@pytest.mark.parametrize("name", ["max_match", "min_match", "growth"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None, "2"])
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected an int of at least 1, got"):
        LookupDrafter(**{name: value})


def test_open_text_costs_what_plain_decoding_costs():
    """No row wants a draft, so no forward is wider than plain decoding's."""
    e = engine(drafter="none", k=4)
    e.drafter = e.round.drafter = LookupDrafter(min_match=6)
    widths, extend = [], e.target.extend
    e.target.extend = lambda packed, **kw: widths.append(len(packed.token_ids)) or extend(packed, **kw)
    submit(e, [Request([11, 3, 4, 60, 61], 12, params(1.0, seed=3, k=4))])
    e.run()
    assert widths == [4] + [1] * 12
