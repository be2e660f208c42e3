"""A failure stays with its request: the others go on, and nothing of the failed one is found by later prompts."""

import pytest
import torch
from support import VOCAB, Request, assert_plain, engine, finish, params, run, submit

POISON = 96
GOOD = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 8, 9, 10], [4, 9, 4, 9, 4, 9, 4]]
BAD = [11, 12, POISON, 13, 14, 15, 16]


def good(k=3):
    return [Request(p, 12, params(float(i % 2), seed=i, k=k)) for i, p in enumerate(GOOD)]


def poison_token(e):
    """Make the target's embedding of one token NaN: every row that holds it has NaN logits."""
    with torch.no_grad():
        e.target.model.get_input_embeddings().weight[POISON] = float("nan")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafter", ["none", "lookup", "same"])
def test_nan_logits_end_their_row_alone(drafter, lag):
    e = engine(drafter=drafter, k=3, lag=lag)
    poison_token(e)
    bad = Request(BAD, 12, params(k=3))
    each = submit(e, [bad, *good()])
    finish(e)
    assert bad.seq.finish_reason == "error"
    assert isinstance(bad.seq.error, FloatingPointError)
    for r in each[1:]:
        if POISON not in r.want:
            assert_plain(r)


def test_kv_of_a_failed_sequence_is_not_found_later():
    e = engine(k=3)
    bad = Request([1, 2, 3, 4, 5, 6, 7, 8, 9], 12)

    class Raising:
        def emitted(self, seq, token_ids):
            raise RuntimeError("no more")

        def finished(self, seq):
            pass

    e.submit(bad.seq, Raising())
    finish(e)
    assert bad.seq.finish_reason == "error"
    assert str(bad.seq.error) == "no more"
    run(e, [Request([1, 2, 3, 4, 5, 6, 7, 8, 9], 12)])


class Fails:
    def __init__(self, answer):
        self.answer = answer

    def propose(self, rows, k):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(rows, k)


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("broken"),
        lambda rows, k: None,
        lambda rows, k: (torch.zeros(1, 1), torch.zeros(1)),
        lambda rows, k: (torch.zeros(len(rows.lengths), k).long(), torch.zeros(99).long()),
    ],
)
def test_a_broken_drafter_costs_speed_and_nothing_else(answer):
    e = engine(k=3, lag=1)
    e.drafter = e.round.drafter = Fails(answer)
    with pytest.warns(UserWarning, match="the drafter failed, decoding goes on without it"):
        run(e, good())
    assert e.drafter is None
    assert e.drafter_error is not None


@pytest.mark.parametrize("during", ["prompt", "round"])
def test_a_failing_forward_ends_what_ran_in_it(during):
    e = engine(k=3)
    extend, failed = e.target.extend, []

    def failing(packed, *, logits=True):
        if logits == (during == "round") and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("none left")
        return extend(packed, logits=logits)

    e.target.extend = failing
    first = submit(e, good())
    finish(e)
    assert any(r.seq.finish_reason == "error" for r in first)
    for r in first:
        if r.seq.error is None:
            assert_plain(r)
        else:
            assert isinstance(r.seq.error, torch.OutOfMemoryError)
    run(e, good())


def test_blocks_that_run_out_only_delay():
    e = engine(k=3, blocks=12, drafter="same")
    allocate, calls = e.pool.allocator.allocate, []

    def sometimes(n):
        calls.append(n)
        return None if n and len(calls) % 3 == 0 else allocate(n)

    e.pool.allocator.allocate = sometimes
    run(e, good())


def test_drafter_never_sees_ids_outside_its_embedding():
    """The target has more embedding rows than the drafter: such ids reach the drafter as 0, and drafts stay legal."""
    e = engine(drafter="random", k=3)
    drafter = e.drafter.model
    small = torch.nn.Embedding(VOCAB - 7, 64)
    drafter.model.set_input_embeddings(small)
    seen = []
    small.register_forward_pre_hook(lambda module, args: seen.append(int(args[0].max())))
    run(e, [Request([95, 96, 94, 1, 2], 12, params(k=3)), *good()])
    assert seen
    assert max(seen) < VOCAB - 7
