"""Acceptance against a loop in plain Python, by the twin and by the kernel in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels import accept
from specdec.kernels.backend import interpreted


def walk(drawn: list[int], drafts: list[int], stop_ids: list[int]) -> tuple[list[int], int, bool, bool]:
    """Emitted tokens, accepted drafts before the cut, ended, failed; `drawn` has one token more than `drafts`."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == drawn[accepted]:
        accepted += 1
    emitted: list[int] = []
    for token in drawn[: accepted + 1]:
        if token < 0:
            return emitted, accepted, False, True
        emitted.append(token)
        if token in stop_ids:
            return emitted, accepted, True, False
    return emitted, accepted, False, False


row = st.tuples(
    st.booleans(),
    st.lists(st.integers(0, 2), max_size=5),
    st.lists(st.integers(-1, 2), min_size=6, max_size=6),
    st.lists(st.integers(0, 2), max_size=2),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(row, min_size=1, max_size=4), st.booleans())
def test_accept_equals_a_plain_walk(rows, kernel):
    k = 5
    drafts = torch.full((len(rows), k), 1)
    stop_ids = torch.full((len(rows), 2), -1)
    packed: list[int] = []
    ends = [0]
    for r, (running, draft, drawn, stops) in enumerate(rows):
        drafts[r, : len(draft)] = torch.tensor(draft, dtype=torch.long)
        stop_ids[r, : len(stops)] = torch.tensor(stops, dtype=torch.long)
        packed += drawn[: len(draft) + 1] if running else []
        ends.append(len(packed))
    arguments = (
        torch.tensor(packed + [1, 1]),  # padding of the bucket
        drafts,
        torch.tensor([len(draft) for _, draft, _, _ in rows]),
        torch.tensor(ends, dtype=torch.int32),
        stop_ids,
        torch.tensor([running for running, *_ in rows]),
    )
    if kernel:
        with interpreted():
            got = accept(*arguments)
    else:
        got = accept(*arguments)
    for r, (running, draft, drawn, stops) in enumerate(rows):
        emitted, accepted, ended, failed = walk(drawn, draft, stops) if running else ([], 0, False, False)
        assert got[0][r].tolist() == emitted + [-1] * (k + 1 - len(emitted))
        assert [int(x[r]) for x in got[1:]] == [len(emitted), accepted, ended, failed]


def test_no_drafts_at_all():
    out, emitted, accepted, _, _ = accept(
        torch.tensor([7, 8]),
        torch.zeros(2, 0, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
        torch.tensor([0, 1, 2]).int(),
        torch.full((2, 1), -1),
        torch.tensor([True, True]),
    )
    assert (out.tolist(), emitted.tolist(), accepted.tolist()) == ([[7], [8]], [1, 1], [0, 0])


def test_bad_input_names_the_argument():
    with pytest.raises(ValueError, match="running: expected shape"):
        accept(
            torch.tensor([7]),
            torch.zeros(1, 0, dtype=torch.long),
            torch.zeros(1, dtype=torch.long),
            torch.tensor([0, 1]).int(),
            torch.full((1, 1), -1),
            torch.tensor([True, True]),
        )
