"""The engine on a GPU, in fp32: the tokens are those of plain decoding, with graphs on and off, compiled or not."""

import copy

import pytest
import torch
import triton
from support import CONFIGS, Processed, Request, engine, finish, odd_after_even, params, run, submit, tiny

from specdec.kernels.reference.philox import gumbel
from specdec.warm_up import warm_up
from tests.test_fp8_kv import run as run_over_fp8

PROMPTS = [[5], [7, 8, 9, 10], [4, 9, 4, 9, 4, 9, 4, 9, 4], [1, 2, 3] * 7, [20] * 12, list(range(1, 30))]


def requests(k, name="llama", new=18):
    return [
        Request(p, new, params(float(i % 2), seed=77 * i, k=k if i != 2 else min(k, 1)), name=name)
        for i, p in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafter", ["none", "lookup", "near", "same"])
def test_tokens_are_plain_decodings(drafter, graphs, k, lag):
    e = engine(drafter=drafter, k=k, lag=lag, device="cuda", graphs=graphs)
    run(e, requests(k))
    if drafter == "same" and k:
        assert e.stats.accepted == e.stats.drafted > 0
    if graphs:
        assert e.graphs.captures > 0
        assert None not in e.graphs._graphs.values(), "a capture failed"


@pytest.mark.parametrize("drafter", ["none", "near"])
def test_prompts_whose_shape_comes_again_are_replayed(drafter):
    e = engine(drafter=drafter, k=3, lag=1, device="cuda", graphs=True)
    forwards = [e.prompts, *([e.drafter_prompts] if drafter == "near" else [])]
    for _ in range(3):
        before = [forward.replays for forward in forwards]
        e.reset_prefix_cache()
        run(e, requests(3))
    for forward, count in zip(forwards, before, strict=True):
        assert forward.replays > count
        assert None not in forward._captured.values(), "a capture failed"


@pytest.mark.parametrize("drafter", ["right", "wrong"])
def test_python_drafters_run_step_by_step(drafter):
    run(engine(drafter=drafter, k=3, lag=1, device="cuda", graphs=True), requests(3))


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafter", ["none", "lookup", "near", "right"])
def test_rows_that_need_the_host_beside_rows_that_do_not(drafter, graphs, lag):
    """Rounds of their own, launched around the others', which stay graphs; with preemption where blocks are few."""
    blocks = 64 if lag < 2 else 24
    e = engine(drafter=drafter, k=3, rows=5, blocks=blocks, lag=lag, device="cuda", graphs=graphs)
    each, processed = requests(3), (odd_after_even,)
    for i, p in enumerate(PROMPTS):
        wish = dict(temperature=float(i % 2), seed=5 * i, k=0 if i == 3 else 3, logits_processors=processed * (i % 2))
        each.append((Processed if i % 2 else Request)(p, 14, params(**wish)))
    run(e, each)
    if graphs:
        assert (e.graphs.captures > 0) == (drafter != "right")  # with a drafter in Python every round needs the host
        assert None not in e.graphs._graphs.values(), "a capture failed"
        assert not any(e.round.needs_host(shape) for _, shape in e.graphs._graphs)


def test_a_processor_waits_for_its_own_rows_alone():
    """What it looks at is there while the round of the other rows, launched before, still runs."""
    e = engine(rows=4, lag=1, device="cuda", graphs=True)
    forward, ahead = e.target.extend, []

    def slow(packed, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(200_000_000)  # some 100 ms in every replay of the others' rounds
        return forward(packed, **kwargs)

    def processor(ids, scores):
        ids.tolist()
        ahead.extend(not f.event.query() for f in e.flights if f.step == e._steps)
        return odd_after_even(ids, scores)

    e.target.extend = slow
    done = Processed([1, 2, 3], 6, params(logits_processors=(odd_after_even,)))
    done.seq.processors = (processor,)
    run(e, [Request([7, 8, 9, 10], 6), done])
    assert True in ahead


@pytest.mark.parametrize("name", CONFIGS)
def test_architectures(name):
    """Greedy and sampled, against the CPU's plain decoding; a difference must be a near tie in fp64."""
    e = engine(name, "same", k=3, lag=1, device="cuda", graphs=True)
    each = submit(e, requests(3, name))
    finish(e)
    for r in each:
        assert r.seq.error is None
        at = next((i for i, (a, b) in enumerate(zip(r.seq.token_ids, r.want, strict=True)) if a != b), None)
        if at is not None:
            assert margin(name, r, at) < 1e-4, f"differs at token {at} by more than rounding"


def margin(name, r, at):
    """How far apart the two tokens' scores at position `at` are, in fp64 on the CPU."""
    with torch.inference_mode():
        logits = copy.deepcopy(tiny(name)).double()(torch.tensor([r.want[:at]])).logits[0, -1]
    ids = torch.tensor([r.want[at], r.seq.token_ids[at]])
    score = logits[ids] / (r.p.temperature or 1.0)
    if r.p.temperature:
        score = score + gumbel(torch.tensor(r.seq.seed), torch.tensor(at), ids)
    return float((score[0] - score[1]).abs())


@pytest.mark.parametrize(("graphs", "compiled"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("drafter", ["none", "lookup", "near"])
def test_kv_in_fp8(drafter, graphs, compiled):
    """What transformers decodes on the CPU over KV rounded alike, with drafts and without.

    Where fp32 rounds differently a key may become its neighbour in fp8: 0.02 times in 40 tokens at a relative difference
    of 1e-6, and then logits move by 0.01 of a median margin of 0.6.
    """
    e = engine(drafter=drafter, k=3, lag=1, device="cuda", graphs=graphs, compiled=compiled, fp8=True)
    run_over_fp8(e)
    run_over_fp8(e)  # on cached prefixes
    if graphs:
        assert None not in e.graphs._graphs.values(), "a capture failed"


@pytest.mark.parametrize("blocks", [12, 14, 19])
def test_preemption(blocks):
    run(engine(drafter="near", k=4, blocks=blocks, lag=1, device="cuda", graphs=True), requests(4))


def test_compiled_layers():
    run(engine(drafter="near", k=3, lag=1, device="cuda", graphs=True, compiled=True), requests(3))


@pytest.mark.parametrize("drafter", ["none", "lookup", "same"])
def test_a_replayed_round_never_waits_for_the_device(drafter):
    """From the second use of a shape on, nothing between launch and read synchronises."""
    e = engine(drafter=drafter, k=3, lag=1, device="cuda", graphs=True)
    run(e, requests(3))
    for r in requests(3):
        e.submit(r.seq)
    read = e._read

    def reading(flight):
        torch.cuda.set_sync_debug_mode("default")
        read(flight)
        torch.cuda.set_sync_debug_mode("error")

    e._read = reading
    try:
        torch.cuda.set_sync_debug_mode("error")
        e.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafter", ["lookup", "near", "same", "random"])
def test_plans_by_the_clock(drafter):
    """k="auto": whatever the times say, the tokens are those, and shapes stay few."""
    e = engine(drafter=drafter, k=4, lag=1, device="cuda", graphs=True, adaptive=True)
    for _ in range(2):
        run(e, [Request(p, 60, params(float(i % 2), seed=77 * i)) for i, p in enumerate(PROMPTS)])
    assert e.stats.drafted > 0
    assert None not in e.graphs._graphs.values(), "a capture failed"
    assert len({shape.draft_steps for _, shape in e.graphs._graphs}) <= 4  # 0, 1, 2, 4


def test_a_failing_capture_runs_step_by_step():
    e = engine(drafter="near", k=3, lag=1, device="cuda", graphs=True)
    whole = e.round.run

    def failing(index, shape):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no capture")
        return whole(index, shape)

    e.round.run = failing
    with pytest.warns(UserWarning, match="could not be captured, it runs step by step"):
        run(e, requests(3))
    assert e.graphs.captures == 0
    assert set(e.graphs._graphs.values()) == {None}


@pytest.mark.parametrize(("drafter", "compiled"), [("near", True), ("lookup", False)])
def test_nothing_is_captured_or_compiled_after_a_warm_up(drafter, compiled):
    """k="auto", requests for as many rows as were warmed up, and fewer: all their shapes are there."""
    e = engine(drafter=drafter, k=2, lag=1, device="cuda", graphs=True, compiled=compiled, adaptive=True)
    warm_up(e, [1, 2], [params()])
    graphs, captures = torch._dynamo.utils.counters["stats"]["unique_graphs"], e.graphs.captures
    assert captures > 0
    for rows in (1, 2):
        run(e, [Request(p, 30 + 5 * i, params(seed=i)) for i, p in enumerate(PROMPTS[1 : 1 + rows])])
    assert e.graphs.captures == captures
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_nothing_compiles_while_rows_run_after_warm_up(monkeypatch):
    """Neither Triton's kernels nor the compiler's: the second run of the same requests finds all it needs."""
    e = engine(drafter="near", k=3, lag=1, device="cuda", graphs=True, compiled=True)
    run(e, requests(3))
    compiled = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **kwargs: compiled.append(kwargs))
    graphs, captures = torch._dynamo.utils.counters["stats"]["unique_graphs"], e.graphs.captures
    e.reset_prefix_cache()
    run(e, requests(3))
    assert not compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert e.graphs.captures == captures
