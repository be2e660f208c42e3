"""Handles: any number of readers, each of which sees all pieces from the first on."""

import threading

import pytest
from support import tiny

from specdec import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(tiny(seed=5), max_model_len=64, max_rows=2) as llm:
        yield llm


def ids(handle):
    return [token for piece in handle for token in piece.token_ids]


def test_readers_in_two_threads_and_one_that_waits_all_get_everything(llm):
    handle = llm.submit([4, 5, 6], PARAMS)
    read = []
    threads = [threading.Thread(target=lambda: read.append(ids(handle))) for _ in range(2)]
    for thread in threads:
        thread.start()
    output = handle.result()
    for thread in threads:
        thread.join()
    assert len(output.token_ids) == 12 and read == [output.token_ids] * 2


def test_reading_again_begins_at_the_first_piece(llm):
    handle = llm.submit([4, 5, 6], PARAMS)
    pieces = iter(handle)
    first = next(pieces)
    assert ids(handle) == handle.result().token_ids == [*first.token_ids, *ids(pieces)]


def test_samples_of_one_request_end_on_their_own(llm):
    handle = llm.submit([4, 5, 6], SamplingParams(max_tokens=12, temperature=1.0, seed=1, n=2, ignore_eos=True))
    pieces = list(handle)
    for output in handle.results():
        mine = [p for p in pieces if p.index == output.index]
        assert [t for p in mine for t in p.token_ids] == output.token_ids
        assert [p.finished for p in mine] == [False] * (len(mine) - 1) + [True]
