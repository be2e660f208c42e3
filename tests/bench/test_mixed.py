"""Mixed load: prompts arrive by the tokens of the batch, their chunks keep to the budget, and nobody's tokens change."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from documents import BASE

from specdec import LLM, SamplingParams
from specdec.bench.benchmark import PLAIN, Benchmark
from specdec.bench.document import read_document
from specdec.bench.mixed import ANSWER, ARRIVALS, MixedRun, mixed_load, run_mixed
from specdec.bench.shapes import random_model
from specdec.bench.stand import Arm, Job, MethodFailed, Stand
from specdec.bench.steps import StepClock
from specdec.bench.trace import StepTime, Trace

BUDGET, LENGTH = 16, 50
LONG = [[20 + i] * LENGTH for i in range(ARRIVALS)]
JOB = Job([0, 1], [[5, 6, 7], [8, 9]], [SamplingParams(max_tokens=30, temperature=0.0, seed=1)] * 2)


def stand(**changes) -> Stand:
    model = random_model("tiny", torch.float32, torch.device("cpu"))
    drafter = random_model("tiny", torch.float32, torch.device("cpu"), seed=1)
    sizes = dict(max_model_len=128, max_rows=2 + ARRIVALS, prompt_budget=BUDGET)
    return Stand(LLM(model, drafter=drafter, **(sizes | changes)))


@pytest.fixture(scope="module")
def shared() -> Iterator[Stand]:
    made = stand()
    yield made
    made.close()


@pytest.mark.parametrize("arm", [PLAIN, Arm("lookup", 4), Arm("draft", 2)], ids=lambda arm: arm.name)
def test_prompts_arrive_at_even_distances_and_change_nobodys_tokens(shared: Stand, arm: Arm) -> None:
    run = run_mixed(shared, arm, JOB, LONG)
    alone = shared.run(PLAIN, JOB)
    assert [t.token_ids for t in run.running] == [t.token_ids for t in alone.traces]
    assert [t.prompt_len for t in run.arrived] == [LENGTH] * ARRIVALS
    assert all(len(t.token_ids) == ANSWER for t in run.arrived)
    for i, late in enumerate(run.arrived):
        before = sum(n for t in run.running for at, n in t.arrivals if at <= late.submitted_s)
        most = 2 * (arm.k + 1) if isinstance(arm.k, int) else 2
        assert 0 <= before - 60 * (i + 1) / (ARRIVALS + 1) < most, "as soon as the batch had emitted its share"


def test_chunks_keep_to_the_budget_and_every_chunk_is_somebodys_wait(shared: Stand) -> None:
    run = run_mixed(shared, PLAIN, JOB, LONG)
    assert max(step.prompt_tokens for step in run.steps) == BUDGET
    assert sum(step.prompt_tokens for step in run.steps) == ARRIVALS * (LENGTH - 1) + 2 + 1
    busy = [gap for gap in run.gaps if gap[2]]
    chunks = [step for step in run.steps[1:] if step.prompt_tokens]  # the first holds the batch's own prompts
    assert len(chunks) == ARRIVALS * -(-(LENGTH - 1) // BUDGET) and len(busy) >= 2 * (len(chunks) - 4)
    assert len(run.gaps) == 2 * 29, "every round of the batch but the first"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_round_read_late_still_counts_as_standing_behind_its_prompt(lag: int) -> None:
    made = stand(lag=lag)
    engine, (seq,) = made.engine("plain"), made.sequences(PLAIN, Job([0], [[5] * 40], JOB.params[:1]))
    clock = StepClock(engine, [seq])
    made.submit(engine, seq)
    steps = [clock.step() for _ in range(6)]
    made.close()
    assert [step.prompt_tokens for step in steps] == [16, 16, 7, 0, 0, 0]
    first = 2 + lag  # the step that reads the first round, launched behind the last chunk
    assert [step.behind for step in steps] == [i == first for i in range(6)]
    assert [step.prompt for step in steps] == [i <= first for i in range(6)]
    assert [step.emitted for step in steps] == [int(i >= first) for i in range(6)]


def test_figures_of_fixed_runs() -> None:
    def waited(ms: float) -> Trace:
        return Trace(50, 0.0, [1], [(ms / 1e3, 1)])

    steps = [StepTime(0.1, 2, 2, True, True, prompt_tokens=n) for n in (7, 12, 0)]
    gaps = [(0.010, 1, False), (0.012, 2, False), (0.040, 2, True)]
    load = mixed_load([MixedRun([], [waited(80)], gaps, steps), MixedRun([], [waited(100)], gaps[:1], [])], 16)
    assert (load.prompt_len, load.arrivals, load.prompt_budget, load.largest_chunk) == (50, 1, 16, 12)
    assert load.ttft_ms.count == 2 and load.ttft_ms.p50 == pytest.approx(80) and load.ttft_ms.p99 == pytest.approx(100)
    assert load.busy_step_ms and load.busy_step_ms.count == 1 and load.busy_step_ms.p50 == pytest.approx(40)
    assert load.quiet_step_ms and load.quiet_step_ms.count == 3 and load.quiet_step_ms.p50 == pytest.approx(10)
    assert load.itl_token_ms.count == 6 and load.itl_token_ms.p99 == pytest.approx(20)
    assert mixed_load([MixedRun([], [waited(1)], gaps[:2], steps)], 16).busy_step_ms is None


def test_a_failure_is_told_and_leaves_the_stand_usable(shared: Stand) -> None:
    with pytest.raises(MethodFailed, match="expected 1 to 127 tokens"):
        run_mixed(shared, PLAIN, JOB, [[5] * 128])
    assert len(run_mixed(shared, PLAIN, JOB, LONG[:1]).arrived) == 1


def test_a_benchmark_of_mixed_load(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_for_lookup(stand, arm, job, prompts):
        if arm.method == "lookup":
            raise MethodFailed("out of memory: 1 TiB")
        return run_mixed(stand, arm, job, prompts)

    monkeypatch.setattr("specdec.bench.benchmark.run_mixed", fails_for_lookup)
    changes = dict(methods=("plain", "lookup"), against=True, mixed_len=40, prompt_budget=16, output_len=12)
    benchmark = Benchmark(dataclasses.replace(BASE, **changes))
    document = benchmark.run()
    benchmark.close()
    mixed = {r.method: r.mixed for r in document.results}
    assert [m for m, load in mixed.items() if load] == ["plain"] and len(mixed) == 4
    load = mixed["plain"]
    assert load and (load.prompt_len, load.arrivals, load.prompt_budget, load.largest_chunk) == (40, ARRIVALS, 16, 16)
    assert load.ttft_ms.count == 2 * ARRIVALS and load.itl_token_ms.count == 2 * 11, "two runs"
    assert [f.reason for f in document.failures] == ["mixed load: out of memory: 1 TiB"]
    (tmp_path / "a.json").write_text(document.to_json())
    assert read_document(tmp_path / "a.json") == document
