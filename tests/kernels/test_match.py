"""Look-up drafting against a search in plain Python, by the twin and by the kernel in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels import match
from specdec.kernels.backend import interpreted


def search(tokens: list[int], k: int, max_match: int, min_match: int) -> tuple[list[int], int, int]:
    """The longest, then latest, earlier match of the newest tokens, and what follows it, copied on past the end."""
    last, best = len(tokens) - 1, (0, 0)
    for end in range(last):
        n = 0
        while n < max_match and n <= end and tokens[end - n] == tokens[last - n]:
            n += 1
        best = max(best, (n, end))
    if best[0] < min_match:
        return [0] * k, 0, 0
    longer = list(tokens)
    for j in range(k):
        longer.append(longer[best[1] + 1 + j])
    return longer[last + 1 :], k, best[0]


rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=33), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows, st.integers(1, 9), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_match_equals_a_plain_search(tokens, k, max_match, min_match, kernel):
    history = torch.full((len(tokens), 41), -7, dtype=torch.int32)  # what lies past the end must not be read as text
    for r, row in enumerate(tokens):
        history[r, : len(row)] = torch.tensor(row, dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in tokens])
    if kernel:
        with interpreted():
            drafts, counts, found = match(history, lengths, k=k, max_match=max_match, min_match=min_match)
    else:
        drafts, counts, found = match(history, lengths, k=k, max_match=max_match, min_match=min_match)
    got = list(zip(drafts.tolist(), counts.tolist(), found.tolist(), strict=True))
    assert got == [search(row, k, max_match, min_match) for row in tokens]


def test_several_tiles_find_the_latest_of_the_longest():
    """2,500 tokens, three tiles of the kernel: matches in the first and in the last tile."""
    text = torch.randint(10, 50, (2500,), generator=torch.Generator().manual_seed(0)).int()
    text[100:104] = text[1500:1504] = text[2496:] = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    for backend in (interpreted, None):
        if backend:
            with backend():
                drafts, _, lengths = match(text[None], torch.tensor([2500]), k=3)
        else:
            drafts, _, lengths = match(text[None], torch.tensor([2500]), k=3)
        assert drafts[0].tolist() == text[1504:1507].tolist()
        assert lengths.tolist() == [4]


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("history", lambda: match(torch.zeros(3).int(), torch.ones(3).int(), k=1)),
        ("history", lambda: match(torch.zeros(3, 4), torch.ones(3).int(), k=1)),
        ("num_tokens", lambda: match(torch.zeros(3, 4).int(), torch.ones(2).int(), k=1)),
        ("k", lambda: match(torch.zeros(3, 4).int(), torch.ones(3).int(), k=0)),
        ("min_match", lambda: match(torch.zeros(3, 4).int(), torch.ones(3).int(), k=1, min_match=0)),
    ],
)
def test_bad_input_names_the_argument(argument, call):
    with pytest.raises(ValueError, match=f"{argument}: expected .*, got "):
        call()
