"""`specdec bench` and `specdec compare` as people call them: exit status, files, one line per error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from documents import document

from specdec.bench.benchmark import Benchmark
from specdec.bench.document import Document, read_document
from specdec.cli import main

TINY = [
    "bench",
    "tiny",
    "--random-weights",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--input-len",
    "9",
    "--output-len",
    "4",
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SPECDEC_DEBUG", raising=False)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


def test_bench_prints_tables_and_writes_everything(run, tmp_path: Path) -> None:
    file, folder = tmp_path / "out.json", tmp_path / "report"
    status, out, err = run(*TINY, "--runs", 1, "--batch", "1,2", "-k", "2", "--json", file, "--report", folder)
    assert status == 0 and "lookup k=2" in out and "Break-even" in out
    assert err == f"specdec: report written to {folder / 'index.html'}\n"
    d = read_document(file)
    assert [(r.batch, r.arm) for r in d.results] == [(b, m) for b in (1, 2) for m in ("plain", "lookup k=2")]
    assert (folder / "charts" / "speedup.png").exists() and read_document(folder / "bench.json") == d


def test_compare_of_two_files(run, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text(document().to_json())
    status, out, err = run("compare", *files)
    assert status == 0 and "within noise" in out and "+0.0%" in out and err == ""


def test_an_interrupt_still_writes_what_was_measured(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Benchmark):
        self.document.interrupted = True
        return self.document

    monkeypatch.setattr(Benchmark, "run", interrupted)
    status, out, err = run(*TINY, "--json", tmp_path / "a.json")
    assert status == 130 and "interrupted: the figures" in out and err == ""
    assert json.loads((tmp_path / "a.json").read_text())["interrupted"] is True


def test_sigterm_ends_it_as_ctrl_c_does(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, measure = signal.getsignal(signal.SIGTERM), Benchmark._one_run

    def stopped(self: Benchmark, point, number, measured):
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        measure(self, point, number, measured)

    monkeypatch.setattr(Benchmark, "_one_run", stopped)
    status, out, _ = run(*TINY, "--json", tmp_path / "a.json")
    d = read_document(tmp_path / "a.json")
    assert status == 130 and d.interrupted and [len(r.decode_tok_s.values) for r in d.results] == [1, 1]
    assert "interrupted: the figures" in out and signal.getsignal(signal.SIGTERM) is before


def test_what_was_measured_is_written_before_the_rest(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the process: here an error that nothing expects, at the second point."""
    measure, file = Benchmark._measure, tmp_path / "a.json"

    def failing(self: Benchmark, point):
        if point.batch == 2:
            raise RuntimeError("the machine is taken away")
        measure(self, point)

    monkeypatch.setattr(Benchmark, "_measure", failing)
    status, out, err = run(*TINY, "--runs", 1, "--batch", "1,2", "-k", 1, "--json", file)
    assert (status, out, err) == (1, "", "specdec: error: the machine is taken away\n")
    d = read_document(file)
    assert [(r.batch, r.arm) for r in d.results] == [(1, "plain"), (1, "lookup k=1")] and d.break_even


def test_a_file_that_cannot_be_written_any_more_costs_no_figures(run, tmp_path: Path, monkeypatch) -> None:
    """A folder that goes away after the first batch: the others are measured, the tables come, then the error."""
    folder, wanted = tmp_path / "folder", Document.to_json
    folder.mkdir()

    def to_json(d: Document) -> str:
        if len(d.results) == 4 and folder.exists():
            folder.rename(tmp_path / "elsewhere")
        return wanted(d)

    monkeypatch.setattr(Document, "to_json", to_json)
    status, out, err = run(*TINY, "--runs", 1, "--batch", "1,2", "-k", 1, "--json", folder / "a.json")
    assert status == 1 and out.count("lookup k=1") > 4 and err.count("\n") == 1
    assert err.startswith("specdec: error: ") and "No such file" in err
    assert [f.name for f in (tmp_path / "elsewhere").iterdir()] == ["a.json"]
    assert len(read_document(tmp_path / "elsewhere" / "a.json").results) == 2


def test_a_pipe_gets_the_document_once(run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        status, _, _ = run(*TINY, "--runs", 1, "--batch", "1,2", "-k", 1, "--json", pipe)
        text, _ = reader.communicate()
    assert status == 0 and len(json.loads(text)["results"]) == 4


def test_an_interrupt_before_anything_is_measured_says_so(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.bench.benchmark.load_inputs", pressed)
    assert run(*TINY) == (130, "", "specdec: error: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench"], "Missing argument"),
        ([*TINY, "--batch", "1,two"], "batch: expected numbers such as 1,4,16"),
        ([*TINY, "--kv-dtype", "int8"], "kv-dtype: expected one of auto, fp8, got 'int8'"),
        ([*TINY, "--dtype", "int8"], "dtype: expected one of auto, float32, bfloat16, float16, got 'int8'"),
        ([*TINY, "--batch", "0"], "batch: expected at least 1, got 0"),
        ([*TINY, "--json", "/proc/a.json"], "json: expected a file that can be written, got /proc/a.json: No such"),
        ([*TINY, "--temperature", "1e300"], "temperature: expected at least 0 and at most 1e+30"),
        ([*TINY, "-k", "some"], "k: expected auto or numbers"),
        ([*TINY, "--temperature", "hot"], "temperature: expected numbers"),
        ([*TINY, "--methods", "magic"], "methods: expected some of plain, lookup, draft"),
        ([*TINY, "--methods", ""], "methods: expected some of plain, lookup, draft, got ''"),
        ([*TINY, "--methods", "draft"], "methods: draft needs --drafter MODEL"),
        ([*TINY, "--runs", "0"], "runs: expected at least 1"),
        ([*TINY, "--mixed", "1k,2k"], "mixed: expected one number of tokens, such as 4k, got '1k,2k'"),
        ([*TINY, "--mixed", "0"], "mixed: expected at least 1, got 0"),
        ([*TINY, "--context", "1k"], "--input-len and --context say the same"),
        ([*TINY, "--against", "vllm"], "against: expected transformers, got vllm"),
        ([*TINY, "--json", "/no/such/folder/a.json"], "json: expected a file in a folder that is there"),
        ([*TINY, "--json", str(Path(__file__).parent)], "json: expected a file that can be written, got"),
        ([*TINY, "--report", "/proc/none"], "report: expected a folder that can be written, got /proc/none"),
        (["bench", "tiny", "--random-weights", "--context", ""], "input-len, context: expected numbers"),
        ([*TINY, "--report", __file__], "report: expected a folder, got the file"),
        (["bench", "tiny", "--random-weights"], "random-weights: such a model has no tokenizer"),
        ([*TINY, "--synthetic-acceptance", "9", "-k", "4"], "synthetic-acceptance: expected 1 to 5"),
        (["compare", "/no/such.json", "/no/such.json"], "No such file"),
        (["compare", __file__, __file__], "expected JSON"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(run, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments)
    assert status == 2 and out == "" and err.startswith("specdec: error: ") and message in err and err.count("\n") == 1


def test_failures_are_one_line_and_status_1(run, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"fine"\n{"prompt": 3}\n')
    for arguments, message in [
        (["bench", "/no/such/model"], "unknown model"),
        (["bench", "m", "--prompts", tmp_path / "p.jsonl"], "p.jsonl, line 2: expected a string"),
        (["bench", "m", "--prompts", tmp_path / "none.jsonl"], "none.jsonl: No such file or directory"),
        (["bench", "m", "--prompts", tmp_path], f"prompts: {tmp_path}: Is a directory"),
        ([*TINY, "--output-len", 5000], "output-len: expected at most 2047, the model's positions less one, got 5000"),
        ([*TINY, "--drafter", ""], "drafter: random-weights: expected one of llama-8b"),
        (["bench", "/no/such/model", "--drafter", "/no/such/drafter"], "drafter: unknown model '/no/such/drafter'"),
        ([*TINY, "--drafter", "llama-9b"], "drafter: random-weights: expected one of llama-8b"),
        ([*TINY, "--mixed", "4k"], "mixed: expected at most 2032, the model's positions less the output's, got 4096"),
        (["bench", "llama-9b", "--random-weights", "--input-len", "4"], "expected one of llama-8b"),
    ]:
        status, out, err = run(*arguments)
        assert status == 1 and out == "" and message in err and err.count("\n") == 1, err


def test_report_without_matplotlib_is_refused_before_anything_runs(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = run(*TINY, "--report", "out")
    assert status == 2 and "pip install 'specdec[bench]'" in err


def test_help_and_bad_usage_load_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from specdec.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    for arguments in (["bench", "--help"], ["bench", "m", "--batch", "x"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.stdout.endswith("False False\n"), done.stderr
