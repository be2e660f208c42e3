"""Verifiers that compare probabilities, inside the engine: greedy rows are plain decoding's, rows that fail fail alone.

That their sampled output has the target's distribution is integrated exactly, and tested through the engine, in
tests/audit.
"""

import pytest
from support import VOCAB, Oracle, Request, assert_plain, engine, finish, params, run, submit

from specdec.sequence import Sequence

PROMPTS = [[5], [7, 8, 9, 10], [1, 2, 3] * 5, [20] * 9]
METHODS = ("rejection", "block")


def requests(temperatures, new=10, k=None):
    """Greedy rows with what plain decoding makes of them, and sampled ones."""
    each = [params(t, seed=i, k=i if k is None else k) for i, t in enumerate(temperatures)]
    return [
        Request(a, new, p) if p.temperature == 0 else Sampled(a, new, p) for a, p in zip(PROMPTS, each, strict=True)
    ]


class Sampled:
    """A sequence whose tokens nobody knows beforehand."""

    def __init__(self, prompt, new, p):
        self.seq = Sequence(list(prompt), p, limit=len(prompt) + new)

    def known(self):
        return [], 0


@pytest.mark.parametrize("drafter", ["lookup", "near", "right"])
@pytest.mark.parametrize("verifier", METHODS)
def test_greedy_rows_are_plain_decoding(verifier, drafter):
    e = engine(drafter=drafter, k=3, verifier=verifier)
    run(e, requests([0.0] * 4))
    if drafter == "right":
        assert e.stats.accepted == e.stats.drafted > 0


@pytest.mark.parametrize("drafter", ["lookup", "near", "wrong"])
@pytest.mark.parametrize("verifier", METHODS)
def test_greedy_rows_among_sampled_ones_are_plain_decoding(verifier, drafter):
    e = engine(drafter=drafter, k=4, verifier=verifier, lag=1)
    each = submit(e, requests([0.0, 1.0, 0.0, 0.7]))
    finish(e)
    for greedy in each[::2]:
        assert_plain(greedy)
    for sampled in each[1::2]:
        assert sampled.seq.error is None and len(sampled.seq) == sampled.seq.limit


@pytest.mark.parametrize("verifier", METHODS)
def test_a_copy_of_the_target_has_its_drafts_accepted(verifier):
    """Q is P rounded to half precision, so nearly every draft stands, and the residual is empty or close to it."""
    e = engine(drafter="same", k=4, verifier=verifier)
    submit(e, requests([1.0] * 4, new=20, k=4))
    finish(e)
    assert e.stats.accepted > 0.97 * e.stats.drafted > 0


@pytest.mark.parametrize("verifier", METHODS)
def test_the_same_seed_gives_the_same_tokens(verifier):
    """With a fixed k: what is drawn does not depend on the other rows of the batch, nor on how far the host is behind."""

    def tokens(rows, lag):
        e = engine(drafter="near", k=3, verifier=verifier, rows=rows, lag=lag)
        return [r.seq.token_ids for r in submit(e, requests([1.0] * 4, new=6)) if finish(e) is None]

    assert tokens(4, 0) == tokens(1, 1)


@pytest.mark.parametrize("verifier", METHODS)
def test_without_drafts_it_is_sampling(verifier):
    e = engine(drafter="near", k=3, verifier=verifier)
    each = submit(e, requests([1.0] * 4, k=0))
    finish(e)
    assert e.stats.drafted == 0
    assert all(len(r.seq) == r.seq.limit for r in each)


@pytest.mark.parametrize("verifier", METHODS)
def test_a_row_of_nan_fails_alone(verifier):
    e = engine(drafter="right", k=3, verifier=verifier)
    each = submit(e, requests([0.0, 1.0, 0.0, 1.0], k=3))
    extend, bad = e.target.extend, each[1].seq

    def poisoned(packed, **kwargs):
        logits = extend(packed, **kwargs)
        if logits is not None and bad in e.scheduler.running and len(bad) > bad.prompt_len + 3:
            row = e.scheduler.running.index(bad)
            logits[packed.cu_seqlens_q[row + 1] - 1] = float("nan")
        return logits

    e.target.extend = poisoned
    finish(e)
    assert isinstance(bad.error, FloatingPointError)
    for greedy in each[::2]:
        assert_plain(greedy)


@pytest.mark.parametrize("verifier", METHODS)
def test_end_tokens_cut_a_block(verifier):
    """The first emitted end token ends a row, wherever in the block it stands."""
    for at in range(1, 6):
        e = engine(drafter="right", k=5, verifier=verifier)
        full = Request(PROMPTS[1], 10).full
        end = full[len(PROMPTS[1]) + at - 1]
        assert isinstance(e.drafter, Oracle)
        run(e, [Request(PROMPTS[1], 10, eos=(end,))])


def test_drafts_of_a_smaller_vocabulary():
    """A drafter that knows 40 of the tokens: greedy rows are plain decoding's, and tokens past its own come from the target."""
    e = engine(drafter="near", k=3, verifier="rejection")
    e.drafter.vocab_size = 40
    each = submit(e, requests([0.0, 1.0, 0.0, 1.0]))
    finish(e)
    for greedy in each[::2]:
        assert_plain(greedy)
    assert max(t for r in each[1::2] for t in r.seq.output_ids) >= 40
    assert e.stats.drafted > 0 and VOCAB > 40
