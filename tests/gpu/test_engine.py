"""The engine on a GPU, in fp32: the tokens are those of plain decoding, with graphs on and off, compiled or not."""

import pytest
import torch
from support import CONFIGS, Request, engine, params, run

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


@pytest.mark.parametrize("drafter", ["right", "wrong"])
def test_python_drafters_run_step_by_step(drafter):
    run(engine(drafter=drafter, k=3, lag=1, device="cuda", graphs=True), requests(3))


@pytest.mark.parametrize("name", CONFIGS)
def test_architectures(name):
    run(engine(name, "same", k=3, lag=1, device="cuda", graphs=True), requests(3, name))


@pytest.mark.parametrize("blocks", [10, 14, 19])
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
