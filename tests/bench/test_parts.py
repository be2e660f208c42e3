"""The small parts on fixed inputs: traces, differences, floors, break-even, transformers' clock, forced acceptance."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny

from specdec import SamplingParams
from specdec.bench import memory
from specdec.bench.breakeven import Cost, alpha_for, best_depths, break_even
from specdec.bench.floor import Traffic, copy_bandwidth, floor
from specdec.bench.losslessness import compare_tokens, first_difference, logit_margin
from specdec.bench.memory import peak_bytes, reset_peak
from specdec.bench.outside import METHODS, _as_run, run_transformers
from specdec.bench.split import Split, StepByStep
from specdec.bench.stand import Arm, Job, MethodFailed, out_of_memory, reason, rounds_of
from specdec.bench.statistics import expected_length
from specdec.bench.summary import goodput, per_step, per_token, round_ms
from specdec.bench.trace import Run, StepTime, Trace
from specdec.buckets import Buckets
from specdec.round import RoundShape


def trace(*arrivals: tuple[float, int], submitted: float = 0.0) -> Trace:
    tokens = sum(n for _, n in arrivals)
    return Trace(3, submitted, list(range(tokens)), list(arrivals))


# Traces


def test_first_token_gaps_and_time_per_token() -> None:
    t = trace((1.0, 2), (1.5, 3), (1.7, 1), submitted=0.25)
    assert t.ttft_s == 0.75 and t.gaps == [(0.5, 3), (pytest.approx(0.2), 1)]
    assert t.seconds_per_token == pytest.approx(0.7 / 4), "the tokens of the first round come with the prompt's time"
    assert trace((1.0, 2)).seconds_per_token is None


def test_per_token_shares_a_burst_and_per_step_does_not() -> None:
    traces = [trace((1.0, 1), (1.4, 4), (1.5, 1))]
    token, step = per_token(traces), per_step(traces)
    assert token and token.count == 5 and token.p99 == pytest.approx(100) and token.mean == pytest.approx(100)
    assert step and step.count == 2 and step.p99 == pytest.approx(400) and step.p50 == pytest.approx(100)
    assert per_token([trace((1.0, 1))]) is None


def test_decode_leaves_out_steps_with_prompt_work_and_round_time_counts_full_rounds() -> None:
    steps = [
        StepTime(5.0, 0, 0, True),
        StepTime(1.0, 2, 2, True),
        StepTime(0.5, 2, 4, False),
        StepTime(0.3, 2, 2, False),
        StepTime(0.1, 1, 1, False),
    ]
    run = Run([trace((6.0, 4)), trace((6.0, 5))], steps, 6.9, 0)
    assert run.decode == (7, pytest.approx(0.9)) and run.whole == (9, 6.9) and run.full_rounds == [0.5, 0.3]
    spread = round_ms([[run], [run]])
    assert spread and spread.median == pytest.approx(400)
    assert round_ms([[Run([trace((1.0, 1))], [], 1.0, 0)]]) is None


def test_goodput_counts_requests_that_meet_the_target() -> None:
    fast, slow = trace((1.0, 1), (1.1, 9)), trace((1.0, 1), (2.0, 9))
    assert goodput([Run([fast, slow], [], 2.0, 0)], target_ms=50) == 5
    assert goodput([Run([fast, slow], [], 2.0, 0)], target_ms=500) == 10
    assert goodput([Run([trace((1.0, 1))], [], 2.0, 0)], target_ms=1) == 0.5, "one token has no time between tokens"


def test_rounds_of_adds_up() -> None:
    a, b = trace(), trace()
    a.rounds, b.rounds = Counter({(4, 2): 3}), Counter({(4, 2): 1, (0, 0): 2})
    assert rounds_of([Run([a, b], [], 1.0, 0)]) == Counter({(4, 2): 4, (0, 0): 2})


# Losslessness


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None and first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2 and first_difference([], [1]) == 0


def test_differences_come_with_their_margin() -> None:
    asked = []

    def margin(*where: int) -> float:
        asked.append(where)
        return 0.5

    loss = compare_tokens([[1, 2, 3], [4, 5], [6]], [[1, 2, 3], [4, 9], [6, 7]], margin, "plain")
    assert (loss.compared, loss.identical) == (3, 1) and asked == [(1, 1, 5, 9)]
    assert [(d.request, d.token, d.plain_id, d.other_id, d.margin) for d in loss.differences] == [
        (1, 1, 5, 9, 0.5),
        (2, 1, None, 7, None),
    ]
    assert loss.line == "2 of 3 requests differ from plain, first: request 2 at token 1, margin 0.5"
    many = compare_tokens([[i] for i in range(9)], [[-1]] * 9, margin, "plain")
    assert many.identical == 0 and len(many.differences) == 5


def test_margin_is_the_models_own() -> None:
    model, prefix = tiny("llama"), [5, 6, 7]
    with torch.no_grad():
        logits = model(torch.tensor([prefix])).logits[0, -1]
    best = int(logits.argmax())
    assert logit_margin(model, prefix, best, 3) == pytest.approx(float(logits[best] - logits[3]), abs=1e-5)


# Rounds


def test_parts_of_a_round_never_exceed_it() -> None:
    parts = Split.scaled([1.0, 4.0, 2.0, -0.5, 1.0], 10.0)
    assert (parts.draft_ms, parts.verify_ms, parts.other_ms, parts.host_ms, parts.idle_ms) == (1, 4, 0, 1, 2)
    slower = Split.scaled([1.0, 8.0, 2.0, 0.0, 1.0], 6.0)
    assert (slower.draft_ms, slower.verify_ms, slower.sample_ms, slower.host_ms, slower.idle_ms) == (0.5, 4, 1, 0.5, 0)
    assert Split.scaled([0.0] * 5, 3.0).idle_ms == 3


# Floors and break-even


def test_floor_is_bytes_over_bandwidth() -> None:
    target, drafter = Traffic(1000, 2.0), Traffic(100, 1.0)
    plain = floor(target, None, 0, context=50, round_s=2.0, bandwidth=1100)
    assert (plain.bytes, plain.ms, plain.percent) == (1100, 1000, 50)
    assert floor(target, drafter, 3, 50, 2.0, 1100).bytes == 1100 + 3 * 150
    assert copy_bandwidth(torch.device("cpu")) > 0


def test_break_even_is_the_ratio_of_round_times() -> None:
    even = break_even(Cost("draft", 1, 60, k=4, depth=4.0, round_ms=15.0, plain_round_ms=10.0))
    assert even.length == 1.5 and even.alpha is not None
    assert expected_length(even.alpha, 4) == pytest.approx(1.5, abs=1e-9)
    assert break_even(Cost("draft", 1, 60, 2, 2.0, 35.0, 10.0)).alpha is None, "three tokens at most"
    assert even.share == pytest.approx(0.5 / 4) and break_even(Cost("draft", 1, 60, 2, 2.0, 35.0, 10.0)).share > 1
    partly = break_even(Cost("lookup", 1, 60, 10, 1.5, 12.0, 10.0))
    assert partly.alpha is None and partly.share == pytest.approx(0.2 / 1.5), "its rounds drafted 1.5, not 10"
    assert break_even(Cost("draft", 1, 60, "auto", 4.0, 15.0, 10.0)).alpha is None, "of no fixed depth"
    idle = [break_even(Cost("draft", 1, 60, "auto", 0.0, ms, 10.0)).share for ms in (9.9, 10.1)]
    assert idle == [0, float("inf")]
    assert alpha_for(1.0, 4) == 0.0 and alpha_for(0.9, 4) == 0.0 and alpha_for(5.0, 4) == pytest.approx(1.0)


def test_best_depth_grows_with_acceptance() -> None:
    costs = [Cost("draft", 1, 60, k, float(k), 10.0 + 1.5 * k, 10.0) for k in (1, 2, 4, 8)]
    found = {b.alpha: b for b in best_depths(costs, (0.1, 0.5, 0.9))}
    assert found[0.1].k == 0 and found[0.1].speedup == 1
    assert found[0.5].k in (1, 2) and found[0.9].k == 8
    assert found[0.9].speedup == pytest.approx(expected_length(0.9, 8) / 2.2)
    assert best_depths([Cost("lookup", 1, 60, 8, 2.0, 10.0, 10.0)]) == [], "rounds that drafted less say nothing of k"


# transformers


def job(*prompts: list[int], tokens: int = 6, temperature: float = 0.0) -> Job:
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=1)
    return Job(list(range(len(prompts))), list(prompts), [params] * len(prompts))


def test_clock_becomes_steps_and_arrivals() -> None:
    run = _as_run(job([1, 2], [3]), [[7, 8, 9], [7]], [(1.0, 1), (1.5, 3)], 0.25, 2.0, peak=5)
    assert run.steps == [StepTime(0.75, 2, 2, True), StepTime(0.5, 1, 2, False)]
    assert [t.arrivals for t in run.traces] == [[(1.0, 1), (1.5, 2)], [(1.0, 1)]]
    assert run.decode == (2, 0.5) and run.whole == (4, 2.0) and run.peak_bytes == 5


@pytest.mark.parametrize("method", METHODS.values())
def test_transformers_generates_the_same_tokens_by_all_its_methods(method: str) -> None:
    model, assistant = tiny("llama"), tiny("llama", noise=0.01)
    want = model.generate(torch.tensor([[5, 6, 7, 5, 6]]), max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    run = run_transformers(model, assistant, method, job([5, 6, 7, 5, 6]))
    assert run.traces[0].token_ids == want and run.emitted == 6
    assert sum(n for _, n in run.traces[0].arrivals) == 6 and run.steps[0].prompt and not run.steps[1].prompt


def test_transformers_pads_a_batch_on_the_left() -> None:
    model = tiny("llama")
    both = run_transformers(model, None, METHODS["plain"], job([5, 6, 7], [9]))
    alone = [run_transformers(model, None, METHODS["plain"], job(p)).traces[0].token_ids for p in ([5, 6, 7], [9])]
    assert [t.token_ids for t in both.traces] == alone
    with pytest.raises(MethodFailed, match="one request at a time"):
        run_transformers(model, None, METHODS["lookup"], job([5], [6]))
    with pytest.raises(MethodFailed, match="index out of range"):
        run_transformers(model, None, METHODS["plain"], job([5000]))


# Small words


def test_names_and_reasons() -> None:
    assert (Arm("plain", 0).name, Arm("draft", 4).name, Arm("transformers", "").name) == (
        "plain",
        "draft k=4",
        "transformers",
    )
    assert out_of_memory(MemoryError()) and out_of_memory(RuntimeError("CUDA out of memory."))
    assert (
        not out_of_memory(ValueError("no"))
        and reason(ValueError("a\n b")) == "a b"
        and reason(KeyError()) == "KeyError"
    )


# Memory


def test_peak_memory_of_a_cpu_is_that_since_the_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    reset_peak(cpu)
    held = torch.ones(1 << 24)
    assert peak_bytes(cpu) > held.nbytes
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    (tmp_path / "status").write_text("VmPeak:\t 99 kB\nVmHWM:\t   12 kB\n")
    assert peak_bytes(cpu) == 12 * 1024
    reset_peak(cpu)
    assert (tmp_path / "clear_refs").read_text() == "5"
    monkeypatch.setattr(memory, "_PROC", tmp_path / "nowhere")
    reset_peak(cpu)
    assert peak_bytes(cpu) > held.nbytes, "elsewhere the peak of the whole life"


# Rounds step by step


@pytest.mark.parametrize("rows", [1, 3, 21, 24, 70])
def test_rounds_step_by_step_have_the_sizes_of_graphs(rows: int) -> None:
    """Of other sizes layers would be compiled anew, seconds for each, and what is split would not be what was measured."""
    ran: list[tuple[list[int], RoundShape]] = []
    on_cpu = SimpleNamespace(device=torch.device("cpu"))
    round_: Any = SimpleNamespace(
        elastic=False, rows=on_cpu, run=lambda index, shape: ran.append((index.tolist(), shape))
    )
    buckets = Buckets()
    for per_row in (0, 1, 3, 16):
        shape = RoundShape(15, rows * (1 + per_row), noise=False, filters=False)
        StepByStep(round_, buckets).run(list(range(rows)), shape)
        bucket, wanted = buckets.choose(rows, shape)
        assert ran.pop() == ([*range(rows), *[-1] * (bucket - rows)], wanted)
        StepByStep(round_, None).run(list(range(rows)), shape)
        assert ran.pop() == (list(range(rows)), shape)
