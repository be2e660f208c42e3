"""A failure stays with its request: the others go on, and nothing of the failed one is found by later prompts."""

import warnings

import pytest
import torch
from support import DRAFTERS, VOCAB, Oracle, Request, assert_plain, engine, finish, params, run, submit
from watch import Watch

from specdec.draft import Draft
from specdec.sequence import Status

POISON = 96
GOOD = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 8, 9, 10], [4, 9, 4, 9, 4, 9, 4]]
BAD = [11, 12, POISON, 13, 14, 15, 16]


def good(k=3):
    return [Request(p, 12, params(float(i % 2), seed=i, k=k)) for i, p in enumerate(GOOD)]


def assert_ended(request, error, reason="error"):
    """The request failed by itself: what it emitted before is what plain decoding gives."""
    assert request.seq.finish_reason == reason
    assert isinstance(request.seq.error, error)
    assert request.seq.token_ids == request.full[: len(request.seq)]


# -- NaN


def poison_token(e):
    """Make the target's embedding of one token NaN: every row that holds it has NaN logits."""
    with torch.no_grad():
        e.target.model.get_input_embeddings().weight[POISON] = float("nan")


def spoil_logits(e, token):
    """NaN logits after every occurrence of `token`, its KV sound. Returns the hook's handle."""

    def spoil(module, args, kwargs, out):
        out.logits[0][kwargs["input_ids"][0] == token] = float("nan")

    return e.target.model.register_forward_hook(spoil, with_kwargs=True)


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


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_nan_in_the_middle_of_a_round_keeps_the_tokens_before_it(drafter, lag):
    """NaN after the i-th emitted token: exactly i tokens stay, also if the round had accepted drafts past it."""
    bad = Request(GOOD[0], 12, params(k=4))
    for i in (0, 1, 4):
        token = bad.full[len(GOOD[0]) + i]
        first = bad.full.index(token)
        request = Request(GOOD[0], 12, params(k=4))
        e = engine(drafter=drafter, k=4, lag=lag)
        handle = spoil_logits(e, token)
        others = [r for r in good() if token not in r.full]
        submit(e, [request, *others])
        finish(e)
        assert_ended(request, FloatingPointError)
        assert request.seq.token_ids == bad.full[: max(first + 1, len(GOOD[0]))]
        for r in others:
            assert_plain(r)
        handle.remove()
        run(e, [Request(GOOD[0], 12, params(k=4))])


def test_nan_at_a_rejected_draft_harms_nobody():
    """A wrong draft may well have NaN logits of its own; the row never gets there."""
    e = engine(drafter="wrong", k=3)
    request = Request(GOOD[0], 12, params(k=3))
    wrong = {(t + 1) % VOCAB for t in request.full} - set(request.full)
    assert wrong
    for token in wrong:
        spoil_logits(e, token)
    run(e, [request])
    assert e.stats.drafted > 0


def nan_while(e, token, armed):
    """The target's embedding of `token` is NaN while `armed` holds something: a fault that passes."""

    def spoil(module, args, out):
        return torch.where((args[0] == token)[..., None] & bool(armed), float("nan"), out)

    e.target.model.get_input_embeddings().register_forward_hook(spoil)


# -- listeners


class Listening:
    """A listener that fails when told of its n-th piece, or of the end."""

    def __init__(self, fails_at=None, at_end=False):
        self.fails_at, self.at_end, self.pieces, self.ends = fails_at, at_end, [], 0

    def emitted(self, seq, token_ids):
        self.pieces.append(token_ids)
        if len(self.pieces) == self.fails_at:
            raise RuntimeError("no more")
        return len(token_ids), False

    def finished(self, seq):
        self.ends += 1
        if self.at_end:
            raise RuntimeError("not even an end")


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("drafter", ["none", "right"])
def test_a_raising_listener_ends_its_sequence(drafter, lag):
    e = engine(drafter=drafter, k=3, lag=lag)
    bad, others, listener = Request(GOOD[0], 12, params(k=3)), good()[1:], Listening(fails_at=2)
    if isinstance(e.drafter, Oracle):
        e.drafter.known.append(bad.known())
    e.submit(bad.seq, listener)
    submit(e, others)
    finish(e)
    assert_ended(bad, RuntimeError)
    assert str(bad.seq.error) == "no more"
    assert (len(listener.pieces), listener.ends) == (2, 1)
    for r in others:
        assert_plain(r)
    run(e, [Request(GOOD[0], 12, params(k=3))])


# -- drafters


class Fails:
    """A drafter that answers with `answer`, from its `after`-th call on; before that it drafts nothing."""

    def __init__(self, answer, after=0):
        self.answer, self.left = answer, after

    def propose(self, rows, k):
        self.left -= 1
        if self.left >= 0:
            return torch.zeros(len(rows.lengths), k).long(), torch.zeros_like(rows.lengths)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(rows, k)


def zeros(rows, k):
    return torch.zeros(len(rows.lengths), k).long(), torch.full_like(rows.lengths, k)


BROKEN = {
    "raises": RuntimeError("broken"),
    "nothing": lambda rows, k: None,
    "three values": lambda rows, k: (*zeros(rows, k), None),
    "a list": lambda rows, k: list(zeros(rows, k)),
    "strings": lambda rows, k: ("ab", "c"),
    "too narrow": lambda rows, k: (torch.zeros(1, 1), torch.zeros(1)),
    "too wide": lambda rows, k: zeros(rows, k + 1),
    "too many counts": lambda rows, k: (zeros(rows, k)[0], torch.zeros(99).long()),
    "a draft of lists": lambda rows, k: Draft([[1] * k], [1]),
}


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_drafter_costs_speed_and_nothing_else(kind, lag, after):
    e = engine(k=3, lag=lag)
    e.drafter = e.round.drafter = Fails(BROKEN[kind], after)
    with pytest.warns(UserWarning, match="the drafter failed, decoding goes on without it") as caught:
        run(e, good())
        run(e, good())
    assert len(caught) == 1
    assert e.drafter is None
    assert e.drafter_error is not None


@pytest.mark.parametrize("lag", [0, 1])
def test_no_request_waits_for_a_draft_model_that_broke(lag, monkeypatch):
    e = engine(drafter="near", k=3, lag=lag)
    run(e, good())
    monkeypatch.setattr(e.draft_model, "extend", lambda packed, logits=True: None)
    with pytest.warns(UserWarning, match="the drafter failed, decoding goes on without it"):
        run(e, good())
        run(e, [Request(prompt) for prompt in ([5, 6, 7] * 5, [9] * 11)])


ODD = {
    "nested lists": lambda rows, k: ([[1] * k] * len(rows.lengths), [k] * len(rows.lengths)),
    "floats": lambda rows, k: (zeros(rows, k)[0].float(), zeros(rows, k)[1].float()),
    "NaN counts": lambda rows, k: (zeros(rows, k)[0], torch.full((len(rows.lengths),), float("nan"))),
    "negative counts": lambda rows, k: (zeros(rows, k)[0], zeros(rows, k)[1] - 99),
    "counts past k": lambda rows, k: (zeros(rows, k)[0], zeros(rows, k)[1] + 99),
    "wild ids": lambda rows, k: (zeros(rows, k)[0] - (1 << 40), zeros(rows, k)[1]),
    "NaN scores": lambda rows, k: Draft(*zeros(rows, k), scores=torch.full((len(rows.lengths), k), float("nan"))),
    "rising scores": lambda rows, k: Draft(*zeros(rows, k), scores=torch.arange(k).expand(len(rows.lengths), k)),
}


@pytest.mark.parametrize("tokens", [None, 7])
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_draft_changes_nothing(kind, tokens):
    """With and without a token bucket, which ranks the scores."""
    e = engine(k=3)
    shape_of = e._shape
    e._shape = lambda g: type(s := shape_of(g))(s.draft_steps, tokens and max(tokens, len(g.seqs)), True, False)
    e.drafter = e.round.drafter = Fails(ODD[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(e, good())


def failing(name="target", logits=True, times=1, when="before"):
    """For Watch.failing: out of memory at the next forwards of one model, of prompts or of rounds."""
    left = [times]

    def fail(at, model, packed, value):
        prompt = value is False
        if model == name and prompt != logits and at == when and left[0] > 0:
            left[0] -= 1
            raise torch.OutOfMemoryError("none left")
        return value

    return fail


# -- forwards


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafter", ["none", "near"])
@pytest.mark.parametrize("during", ["prompt", "round", "round, its KV written"])
def test_a_failing_forward_ends_what_ran_in_it(during, drafter, lag):
    e = engine(drafter=drafter, k=3, budget=5, lag=lag)
    watch = Watch(e, drafter)
    first = good()
    watch.full.update({r.seq: r.full for r in first})
    submit(e, first)
    e.step()
    watch.failing = failing(logits=during != "prompt", when="after" if "written" in during else "before")
    while not e.idle:
        e.step()
        watch.check()
    finish(e)
    assert any(r.seq.error for r in first)
    for r in first:
        if r.seq.error is None:
            assert_plain(r)
        else:
            assert_ended(r, torch.OutOfMemoryError)
    watch.failing = None
    run(e, good())
    watch.check()


def test_a_forward_that_fails_half_way_leaves_nothing_to_find():
    """The first layer has stored its keys, the second one fails, in a prompt's second chunk and in a round."""
    for after in (1, 2, 3, 4, 5):
        e = engine(k=3, budget=4)
        watch, left = Watch(e, "none"), [after]

        def count(module, args, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("none left")

        e.target.model.model.layers[1].register_forward_pre_hook(count)
        first = submit(e, [Request(GOOD[0], 12)])[0]
        finish(e)
        assert_ended(first, torch.OutOfMemoryError)
        again = Request(GOOD[0], 12)
        watch.full.update({again.seq: again.full})
        run(e, [again])
        watch.check()


def test_the_next_prompt_goes_on_after_the_one_it_waited_for_has_failed():
    """A shared beginning that its first owner failed to fill is filled by the next."""
    e = engine(k=0, budget=3)
    watch = Watch(e, "none")
    each = [Request(GOOD[0] + [i, i], 6) for i in range(3)]
    submit(e, each)
    e.step()
    watch.failing = failing(logits=False)
    finish(e)
    assert_ended(each[0], torch.OutOfMemoryError)
    for r in each[1:]:
        assert_plain(r)


# -- blocks


def test_blocks_that_run_out_only_delay():
    e = engine(k=3, blocks=12, drafter="same")
    allocate, calls = e.pool.allocator.allocate, []

    def sometimes(n):
        calls.append(n)
        return None if n and len(calls) % 3 == 0 else allocate(n)

    e.pool.allocator.allocate = sometimes
    run(e, good())


# -- cancelling


def phases(e, request):
    """Steps until the request is in each phase in turn, naming it; before the first, it is not even submitted."""
    yield "new"
    submit(e, [*good()[1:], request])
    yield "waiting"
    e.step()
    assert request.seq.status is Status.EXTENDING
    yield "extending"
    while request.seq.status is not Status.RUNNING:
        e.step()
    yield "running"
    e.scheduler.preempt(request.seq)
    yield "preempted"
    finish(e)
    yield "finished"


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("drafter", ["none", "near", "right"])
@pytest.mark.parametrize("phase", ["new", "waiting", "extending", "running", "preempted", "finished"])
def test_cancel_in_every_phase(phase, drafter, lag):
    e = engine(drafter=drafter, k=3, budget=4, lag=lag)
    request, listener = Request(GOOD[0] + [30, 31], 12, params(k=3)), Listening()
    for now in phases(e, request):
        if now == phase:
            e.cancel(request.seq)
            e.cancel(request.seq)
            break
    if phase == "new":
        e.submit(request.seq, listener)
    else:
        e.listeners[request.seq] = listener
    finish(e)
    assert request.seq.finish_reason == ("length" if phase == "finished" else "cancelled")
    assert request.seq.token_ids == request.full[: len(request.seq)]
    assert listener.ends == (phase != "finished")
    run(e, [Request(GOOD[0] + [30, 31], 12, params(k=3)), *good()])


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("steps", range(7))
def test_cancelling_a_parent_or_a_fork(steps, who):
    """Samples of one prompt go on without the one they share it with, wherever that one stands."""
    p = params(1.0, seed=3, n=3, k=3)
    each = [Request(GOOD[0], 12, p, index=i) for i in range(3)]
    for r in each[1:]:
        r.seq.parent = each[0].seq
    e = engine(drafter="near", k=3, lag=1, budget=3)
    submit(e, each)
    for _ in range(steps):
        e.step()
    e.cancel(each[who].seq)
    finish(e)
    for i, r in enumerate(each):
        if i == who and r.seq.finish_reason == "cancelled":
            assert r.seq.token_ids == r.full[: len(r.seq)]
        else:
            assert_plain(r)
