"""Whole benchmarks of tiny random models: what is in the document, and what interrupts and failures leave of it."""

import copy
import dataclasses
import json
import re
import typing
from pathlib import Path

import jsonschema
import pytest
import torch
from documents import BASE
from tiny_gguf import write_tiny_gguf

from specdec.bench import schema
from specdec.bench.benchmark import PLAIN, Benchmark
from specdec.bench.charts import PARTS
from specdec.bench.document import SCHEMA, Document, read_document
from specdec.bench.split import StepByStep
from specdec.bench.stand import Arm, MethodFailed, Stand
from specdec.bench.statistics import Spread
from specdec.buckets import Buckets
from specdec.verify import ChainVerifier, block

DOCS = Path(__file__).parents[2] / "docs/benchmarking.md"


def run(**changes) -> Document:
    benchmark = Benchmark(dataclasses.replace(BASE, **changes), ["bench", "tiny"])
    try:
        return benchmark.run()
    finally:
        benchmark.close()


@pytest.fixture(scope="module")
def everything() -> Document:
    """All methods, two batch sizes, two depths, against transformers."""
    return run(methods=("plain", "lookup", "draft"), drafter="tiny", batch=(1, 3), k=("auto", 2), against=True, limit=2)


@pytest.fixture(scope="module")
def controlled() -> Document:
    changes = dict(methods=("plain", "lookup", "draft"), drafter="tiny", batch=(3,), k=(4,), output_len=41, runs=1)
    return run(**changes, acceptance_length=2.5)


def test_every_method_at_every_point_plain_first(everything: Document) -> None:
    arms = [(r.batch, r.arm) for r in everything.results]
    ours = ["plain", "lookup k=auto", "lookup k=2", "draft k=auto", "draft k=2", "transformers"]
    outside = ["transformers-lookup", "transformers-assisted"]
    assert arms == [(1, arm) for arm in ours + outside] + [(3, arm) for arm in ours]
    assert everything.failures == [] and not everything.interrupted and everything.label is None


def test_figures_hold_together(everything: Document) -> None:
    for r in everything.results:
        assert r.requests == (2 if r.batch == 1 else 3) and r.tokens == 6 * r.requests
        assert len(r.decode_tok_s.values) == 2 and r.decode_tok_s.low <= r.decode_tok_s.median <= r.decode_tok_s.high
        assert r.ttft_ms.count == 2 * r.requests and r.ttft_ms.p50 <= r.ttft_ms.p99
        assert r.itl_token_ms is None or r.itl_token_ms.p50 <= r.itl_token_ms.p90 <= r.itl_token_ms.p99
        assert 0 <= r.goodput_tok_s <= max(r.whole_tok_s.values) * 1.001
        assert r.peak_bytes > 0 and r.captures == 0 and [t.task for t in r.tasks] == ["random"]
    plain = [r for r in everything.results if r.method == "plain"]
    assert all(r.decode_speedup is None and r.acceptance and r.acceptance.length == 1 for r in plain)
    assert all(r.decode_speedup for r in everything.results if r.method != "plain")


def test_losslessness_of_every_method(everything: Document) -> None:
    for r in everything.results:
        if r.method != "plain":
            assert (
                r.losslessness and r.losslessness.line == f"identical to plain ({r.requests} of {r.requests} requests)"
            )


def test_another_verifier_keeps_greedy_tokens_and_draws_its_own_samples() -> None:
    """Where it samples only its distribution is plain's, so there are no tokens to compare."""
    arms = dict(methods=("plain", "draft"), drafter="tiny", k=(2,), temperatures=(0.0, 1.0), runs=1, output_len=12)
    benchmark = Benchmark(dataclasses.replace(BASE, verifier="block", **arms))
    document = benchmark.run()
    rules = {method: benchmark.stand.engine(method).round.verifier for method in ("plain", "draft")}
    benchmark.close()
    assert all(isinstance(rule, ChainVerifier) and rule.decide is block for rule in rules.values())
    assert document.failures == [] and document.verifier == "block"
    greedy, sampled = (next(r for r in document.results if r.method == "draft" and r.temperature == t) for t in (0, 1))
    assert greedy.losslessness and greedy.losslessness.identical == greedy.losslessness.compared == 1
    assert sampled.losslessness is None and sampled.acceptance and sampled.acceptance.drafted > 0


def test_acceptance_adds_up(everything: Document) -> None:
    for r in everything.results:
        a = r.acceptance
        if a is None:
            assert r.method.startswith("transformers")
            continue
        assert sum(a.histogram) == a.rounds and a.wasted == a.drafted - a.accepted >= 0
        assert sum(i * n for i, n in enumerate(a.histogram)) == a.accepted
        assert a.length == pytest.approx(2 * r.tokens / a.rounds), "two runs"


def test_rounds_have_a_floor_and_a_split(everything: Document) -> None:
    for r in everything.results:
        if r.method in ("plain", "draft"):
            assert r.floor and r.floor.bytes > 0 and r.split and r.split.verify_ms > 0
            # "auto" may well have drafted in few rounds, or in none of those that count
            assert (r.split.draft_ms > 0) == (r.method == "draft") or (r.method, r.k) == ("draft", "auto")
            parts = (getattr(r.split, f"{part}_ms") for part in PARTS)
            assert sum(parts) == pytest.approx(r.round_ms.median) and r.split.copied is None, "of the measured round"
    small, large = (next(r.floor.bytes for r in everything.results if r.arm == arm) for arm in ("plain", "draft k=2"))
    assert large > 2 * small, "a drafter of the target's size reads as much in each of its two forwards"


def test_break_even_covers_what_was_measured(everything: Document) -> None:
    measured = [(r.batch, r.method, r.k) for r in everything.results if r.method in ("lookup", "draft") and r.round_ms]
    assert [(b.batch, b.method, b.k) for b in everything.break_even] == measured and (1, "draft", "auto") in measured
    for b in everything.break_even:
        assert b.length == pytest.approx(b.round_ms / b.plain_round_ms) and (b.alpha is None or b.k == 2)


def test_random_tokens_warn(everything: Document) -> None:
    assert any("random tokens flatter or slander" in warning for warning in everything.warnings)
    assert any("batch 3 repeats the 2 prompts" in warning for warning in everything.warnings)


def test_the_document_survives_json(everything: Document, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(everything.to_json())
    assert read_document(file) == everything
    value = json.loads(file.read_text())
    assert value["schema"] == SCHEMA and value["command"] == ["bench", "tiny"]
    assert value["environment"]["dtype"] == "float32" and "torch" in value["environment"]["versions"]
    assert len(value["workloads"][0]["sha256"]) == 64


def test_controlled_acceptance_is_forced_and_labelled(controlled: Document) -> None:
    assert controlled.label == "controlled acceptance 2.5" and controlled.weights == "random"
    for r in controlled.results:
        assert r.losslessness is None, "forced tokens are nobody's"
        if r.method != "plain":
            assert r.acceptance and r.acceptance.length == pytest.approx(2.5, abs=0.25)
            assert r.acceptance.drafted / r.acceptance.rounds > 3, "look-up drafts are filled up too"
            assert r.acceptance.conditional[0] == pytest.approx(1.0)
    assert not any("random tokens" in warning for warning in controlled.warnings)


def test_sampling_is_lossless_too_and_kv_in_fp8() -> None:
    document = run(methods=("plain", "lookup"), temperatures=(0.0, 0.8), runs=1, kv_dtype="fp8")
    assert document.environment.dtype == "float32, fp8 KV"
    assert [(r.temperature, r.method) for r in document.results] == [
        (t, m) for t in (0, 0.8) for m in ("plain", "lookup")
    ]
    assert all(r.losslessness is None or r.losslessness.identical == 1 for r in document.results)


def test_scales_of_kv_come_from_a_file(tmp_path: Path) -> None:
    file, ones = tmp_path / "scales.json", [[1.0, 1.0]] * 2
    file.write_text(json.dumps({"k": ones, "v": [[0.5, 1.0], [1.0, 2.0]]}))
    settings = dataclasses.replace(BASE, kv_dtype="fp8", kv_scales=file)
    bench = Benchmark(settings)
    scales = bench.stand.llm.kv_scales
    bench.close()
    assert scales is not None and [v.tolist() for v in scales.v] == [[0.5, 1.0], [1.0, 2.0]]
    assert bench.document.settings["kv_scales"] == str(file)
    file.write_text(json.dumps({"k": ones[1:], "v": ones[1:]}))
    with pytest.raises(ValueError, match="kv_scales: expected numbers above 0 for 2 attention calls"):
        Benchmark(settings)


class Interrupt:
    """A progress bar whose watcher presses Ctrl-C at the n-th report that has the words."""

    def __init__(self, at: int, words: str = ": run "):
        self.left, self.words = at, words

    def __call__(self, text: str, share: float) -> None:
        if self.words in text:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("at", "results", "runs"),
    [
        (1, [], 0),  # before anything is measured
        (2, [], 0),  # plain alone compares with nothing
        (4, ["plain", "lookup k=auto"], 1),  # in the second batch of the first run
        (8, ["plain", "lookup k=auto"], 1),  # in the second run, which is not whole
    ],
)
def test_an_interrupt_keeps_what_was_measured(at: int, results: list[str], runs: int) -> None:
    settings = dataclasses.replace(BASE, methods=("plain", "lookup"), limit=3, batch=(1,))
    benchmark = Benchmark(settings, progress=Interrupt(at))
    document = benchmark.run()
    benchmark.close()
    assert document.interrupted and [r.arm for r in document.results] == results
    for r in document.results:
        assert len(r.decode_tok_s.values) == runs and r.requests == (1 if at == 4 else 3) and r.split is None


def test_an_interrupt_while_rounds_are_split_keeps_the_runs() -> None:
    settings = dataclasses.replace(BASE, methods=("plain", "lookup"), batch=(1, 2))
    benchmark = Benchmark(settings, progress=Interrupt(2, "where a round's time goes"))
    document = benchmark.run()
    benchmark.close()
    assert document.interrupted and [(r.batch, len(r.decode_tok_s.values)) for r in document.results] == [(1, 2)] * 2
    assert [r.split is None for r in document.results] == [False, True]


def test_an_interrupt_while_a_point_is_summarised_keeps_the_points_before(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = Benchmark(dataclasses.replace(BASE, batch=(1, 2)))
    floor = benchmark._floor

    def pressed(point, arm, runs):
        if point.batch == 2:
            raise KeyboardInterrupt
        return floor(point, arm, runs)

    monkeypatch.setattr(benchmark, "_floor", pressed)
    document = benchmark.run()
    benchmark.close()
    assert document.interrupted and [r.batch for r in document.results] == [1]


def test_rounds_that_cannot_be_split_are_told_and_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no profiler here")

    monkeypatch.setattr("specdec.bench.split._on_cpu", broken)
    document = run(methods=("plain", "lookup"))
    assert [r.method for r in document.results] == ["plain", "lookup"] and document.results[0].split is None
    assert "plain at batch 1: its rounds were not split: no profiler here" in document.warnings


def test_a_method_out_of_memory_is_reported_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Stand._drafter

    class Hungry:
        def propose(self, rows, k):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    monkeypatch.setattr(Stand, "_drafter", lambda self, m: Hungry() if m == "lookup" else make(self, m))
    with pytest.warns(UserWarning, match="the drafter failed"):
        document = run(methods=("plain", "lookup", "draft"), drafter="tiny", batch=(2,), k=(2,))
    assert [r.arm for r in document.results] == ["plain", "draft k=2"]
    (failure,) = document.failures
    assert (failure.method, failure.batch) == ("lookup", 2) and failure.reason.startswith("out of memory: CUDA out of")


def test_a_draft_model_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr("specdec.bench.inputs._load_drafter", full)
    document = run(methods=("plain", "lookup", "draft"), drafter="tiny", runs=1)
    assert [r.method for r in document.results] == ["plain", "lookup"]
    assert document.failures[0].method == "draft" and "out of memory" in document.failures[0].reason


def test_a_failed_run_leaves_the_stand_usable() -> None:
    benchmark = Benchmark(BASE)
    stand, job = benchmark.stand, benchmark._point(benchmark.inputs.workloads[0], 1, 0.0).jobs[0]
    good = stand.run(PLAIN, job)
    stand.engine("plain").round.run = lambda *_: (_ for _ in ()).throw(RuntimeError("boom"))  # type: ignore[method-assign]
    with pytest.raises(MethodFailed, match="boom"):
        stand.run(PLAIN, job)
    again = stand.run(PLAIN, job)
    assert [t.token_ids for t in again.traces] == [t.token_ids for t in good.traces]
    with pytest.raises(MethodFailed, match="no draft model"):
        stand.run(Arm("draft", 2), job)
    benchmark.close()


def test_a_pool_too_small_for_the_batch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.limits._CPU_BYTES", 4 * 16 * 512)  # four blocks of the tiny model's KV
    document = run(batch=(3,), input_lens=(13,), output_len=30, runs=1)
    assert document.results[0].preemptions > 0 and document.results[0].tokens == 90
    assert any("the KV pool was too small" in warning for warning in document.warnings)


def test_real_prompts_of_a_model_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "p.jsonl").write_text('{"task": "a", "prompt": "hi hi hi hi"}\n{"task": "b", "prompt": "2 2"}\n')
    document = run(
        target=str(tmp_path / "tiny.gguf"), random_weights=False, input_lens=(), prompts=tmp_path / "p.jsonl",
        methods=("plain", "lookup"),
    )  # fmt: skip
    assert document.workloads[0].tasks == {"a": 1, "b": 1} and document.weights == "trained" and not document.warnings
    assert [[t.task for t in r.tasks] for r in document.results] == [["a", "b"]] * 2
    with pytest.raises(ValueError, match="none in prompts that ship"):  # the tiny model has 128 positions
        run(target=str(tmp_path / "tiny.gguf"), random_weights=False, input_lens=(), output_len=127)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(target="llama-9b"), "random-weights: expected one of llama-8b"),
        (dict(input_lens=(5000,)), "input-len, context: expected at most 2042"),
        (dict(drafter="smollm2-135m", methods=("plain", "draft")), "drafter: expected a vocabulary of 512"),
        (dict(device="tpu"), "device: expected"),
        (dict(dtype="int8"), "dtype: expected"),
        (dict(random_weights=False, input_lens=(), prompts=Path("/no/such.jsonl")), "/no/such.jsonl"),
    ],
)
def test_bad_input_is_one_line(changes: dict, message: str) -> None:
    with pytest.raises((ValueError, OSError)) as error:
        run(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_config_file_makes_a_model(tmp_path: Path) -> None:
    config = dict(model_type="llama", vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    config |= dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(target=str(tmp_path), runs=1).results[0].tokens == 6
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="random-weights: .*config.json"):
        run(target=str(tmp_path / "config.json"))


def test_bad_documents_name_the_field(everything: Document, tmp_path: Path) -> None:
    good = json.loads(everything.to_json())
    for change, message in [
        (lambda d: d.update(schema="specdec.bench/0"), "schema: expected 'specdec.bench/1'"),
        (lambda d: d.pop("target"), "target: expected a value, got none"),
        (lambda d: d.update(extra=1), "extra: no such field"),
        (lambda d: d["results"][0].update(batch="one"), r"results\[0\].batch: expected an integer"),
        (
            lambda d: d["results"][1]["acceptance"].update(length=None),
            r"results\[1\].acceptance.length: expected a number",
        ),
        (lambda d: d["results"][0].update(k=1.5), r"results\[0\].k: expected int or str"),
        (lambda d: d.update(results={}), "results: expected a list"),
        (lambda d: d.update(interrupted=1), "interrupted: expected true or false"),
    ]:
        bad = copy.deepcopy(good)
        change(bad)
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=message) as error:
            read_document(tmp_path / "bad.json")
        assert "bad.json" in str(error.value)
    for text in ("", "[1]", "nonsense", "[" * 10_000):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="expected"):
            read_document(tmp_path / "bad.json")


def test_spread_of_one_run_has_no_width(controlled: Document) -> None:
    assert Spread.of([3.0]).relative == 0 and all(r.decode_tok_s.relative == 0 for r in controlled.results)


def schema_fields(kind: type) -> set[str]:
    """The fields of a dataclass and of every dataclass below it."""
    found: set[str] = set()
    for name, hint in typing.get_type_hints(kind).items():
        found.add(name)
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part):
                found |= schema_fields(part)
    return found


def test_the_schema_file_is_the_documents() -> None:
    """Else: python -m specdec.bench.schema > specdec/bench/schema.json"""
    file = Path(schema.__file__).with_suffix(".json")
    assert json.loads(file.read_text()) == schema.json_schema()


def test_documents_are_as_the_schema_says(everything: Document) -> None:
    validator = jsonschema.Draft202012Validator(schema.json_schema())
    value = json.loads(everything.to_json())
    validator.check_schema(validator.schema)
    validator.validate(value)
    value["results"][0]["batch"] = "one"
    assert [list(error.path) for error in validator.iter_errors(value)] == [["results", 0, "batch"]]


def test_every_field_is_documented() -> None:
    documented = set(re.findall(r"`([a-z_0-9]+)(?:\[i\])?`", DOCS.read_text()))
    assert schema_fields(Document) - documented == set()


def test_methods_share_the_graphs_of_prompts() -> None:
    """Those of the target's forwards, and a round padded as a graph is decodes the same."""
    bench = Benchmark(dataclasses.replace(BASE, methods=("plain", "lookup"), batch=(3,), runs=1))
    stand = bench.stand
    assert stand.engine("plain").prompts is stand.engine("lookup").prompts is stand.llm.engine.prompts
    point = bench._point(bench.inputs.workloads[0], 3, 0.0)
    tokens = [[t.token_ids for t in stand.run(PLAIN, point.jobs[0]).traces]]
    stand.engine("plain").graphs = StepByStep(stand.engine("plain").round, Buckets())
    tokens.append([t.token_ids for t in stand.run(PLAIN, point.jobs[0]).traces])
    bench.close()
    assert tokens[0] == tokens[1] and len(tokens[0]) == 3
