"""The command line: text on standard output, one line per error on standard error, exit status 0, 1 or 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import said_by_us
from tiny_gguf import write_tiny_gguf

import specdec
from specdec.cli import main
from specdec.loading import load_model


class Result:
    """Exit status and what was printed by one call of the command."""

    def __init__(self, arguments: list[str], capsys: pytest.CaptureFixture[str]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        self.status = stopped.value.code
        self.out, self.err = capsys.readouterr()

    @property
    def error(self) -> str:
        """The one line that says what is wrong."""
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("specdec: error: "), self.err
        return lines[0].removeprefix("specdec: error: ")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SPECDEC_DEBUG", raising=False)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)  # the command asks before they are loaded
    return lambda *arguments: Result([str(argument) for argument in arguments], capsys)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template, converted already: the first to convert it says so."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CACHE", str(path.parent / "cache"))
        load_model(path, device="cpu")
    return path


@pytest.fixture
def generate(run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tiny.parent / "cache"))
    return lambda *arguments: run("generate", tiny, "--device", "cpu", "--max-tokens", 7, *arguments)


# What it prints


def test_text_goes_to_standard_output_and_figures_to_standard_error(generate) -> None:
    result = generate("hi  2", "--raw")
    assert result.status == 0 and result.out.endswith("\n")
    assert "7 tokens in" in result.err and "acceptance length" in result.err and "tok/s" in result.err


def test_streamed_text_is_the_whole_text(generate) -> None:
    streamed, whole = generate("hi  2", "--raw"), generate("hi  2", "--raw", "--no-stream")
    assert streamed.out == whole.out
    document = json.loads(generate("hi  2", "--raw", "--json").out)
    assert document["outputs"][0]["text"] + "\n" == whole.out


def test_json_is_one_document_with_everything(generate) -> None:
    result = generate("hi", "hi hi", "--json", "--temperature", 1, "--seed", 3, "-n", 2, "--kv-dtype", "fp8")
    assert result.status == 0 and result.err == ""
    document = json.loads(result.out)
    outputs = document["outputs"]
    assert [(o["prompt_index"], o["index"]) for o in outputs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(len(o["token_ids"]) == o["stats"]["num_tokens"] <= 7 for o in outputs)
    assert document["totals"]["tokens"] == sum(len(o["token_ids"]) for o in outputs)
    assert (document["drafter"], document["dtype"], document["device"]) == ("lookup", "float32", "cpu")
    assert document["kv_dtype"] == "fp8"
    assert outputs[0]["seed"] == 3 and outputs[0]["error"] is None


def test_same_seed_same_tokens_with_and_without_drafts(generate) -> None:
    options = ["hi hi hi hi", "--json", "--temperature", 0.5, "--seed", 11]
    runs = [generate(*options, *more) for more in (["--drafter", "none"], ["-k", 3], ["--k", 0])]
    assert len({tuple(json.loads(result.out)["outputs"][0]["token_ids"]) for result in runs}) == 1


def test_json_has_what_became_of_drafts_by_place(generate) -> None:
    options = "hi hi hi hi", "--raw", "--json", "--ignore-eos", "--temperature", 0, "-k", 3, "--max-tokens", 60
    stats = json.loads(generate(*options).out)["outputs"][0]["stats"]
    assert sum(stats["places"]["drafted"]) == stats["drafted"] > 0
    assert sum(stats["places"]["accepted"]) == stats["accepted"]


def test_chat_is_the_default_where_there_is_a_template(generate) -> None:
    by_default, chat, raw = (
        json.loads(generate("hi", "--json", *more).out)["outputs"][0]["prompt_tokens"]
        for more in ([], ["--chat"], ["--raw"])
    )
    assert by_default == chat == 3 and raw == 1  # <start> hi <end>


def test_prompts_of_a_file_come_after_those_of_the_command(generate, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"hi hi"\n\n{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "2"}\n')
    result = generate("hi", "--prompts", file, "--no-stream", "--max-tokens", 2)
    assert result.status == 0
    assert [line for line in result.err.splitlines() if "sample" in line][-1] == "specdec: prompt 4, sample 1"


def test_every_parameter_of_decoding_has_its_option(generate) -> None:
    """Each of them changes what is decoded, or the process would say nothing of it."""

    def ids(*arguments: object) -> list[int]:
        return json.loads(generate("hi", "--raw", "--json", "--ignore-eos", "--temperature", 0, *arguments).out)[
            "outputs"
        ][0]["token_ids"]

    plain = ids()
    first, last = plain[0], plain[-1]
    assert first not in ids("--logit-bias", f"{first}=-inf")
    assert ids("--logit-bias", "3=99", "--logit-bias", "4=50") == [3] * 7
    assert set(ids("--logit-bias", "3=99", "--logit-bias", "4=50", "--presence-penalty", 60)) == {3, 4}
    assert set(ids("--logit-bias", "3=99", "--logit-bias", "4=50", "--frequency-penalty", 15)) == {3, 4}
    assert set(ids("--allowed-token-id", 5, "--allowed-token-id", 6)) <= {5, 6}
    assert ids("--stop-token-id", last) == plain[: plain.index(last) + 1]
    assert len(ids("--stop-token-id", first, "--min-tokens", 3)) > 1
    assert len(set(ids("--repetition-penalty", 9999))) == 7


def test_output_follows_a_grammar(generate) -> None:
    assert re.fullmatch(r"[ab]{3}\n", generate("hi", "--raw", "--no-stream", "--regex", "[ab]{3}").out)
    refused = generate("hi", "--raw", "--regex", "(")
    assert refused.status == 1 and refused.error.startswith("regex: expected one that llguidance understands, got '('")


def test_json_has_the_log_probabilities(generate) -> None:
    result = generate("hi", "--raw", "--json", "--logprobs", 2, "--prompt-logprobs", 0, "--processed-logprobs")
    output = json.loads(result.out)["outputs"][0]
    assert [entry["token_id"] for entry in output["logprobs"]] == output["token_ids"]
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in output["logprobs"])
    assert output["prompt_logprobs"][0] is None
    assert len(output["prompt_logprobs"]) == output["prompt_tokens"]


def test_stop_string_is_left_out(generate) -> None:
    text = json.loads(generate("hi", "--json").out)["outputs"][0]["text"]
    cut = json.loads(generate("hi", "--json", "--stop", text[1:3]).out)["outputs"][0]
    assert cut["finish_reason"] == "stop" and cut["text"] == text[: text.index(text[1:3])]


# What it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "Missing argument"),
        (["generate", "m"], "no prompt: give PROMPT or --prompts FILE"),
        (["generate", "m", "hi", "--bogus"], "No such option"),
        (["generate", "m", "hi", "-k", "-1"], "k: expected auto or a number"),
        (["generate", "m", "hi", "-k", "many"], "k: expected auto or a number"),
        (["generate", "m", "hi", "--temperature", "-1"], "temperature: expected at least 0 and at most 1e+30, got -1"),
        (["generate", "m", "hi", "--top-p", "1.5"], "top_p: expected"),
        (["generate", "m", "hi", "--max-tokens", "0"], "max_tokens: expected at least 1"),
        (
            ["generate", "m", "hi", "--dtype", "int8"],
            "dtype: expected one of auto, float32, bfloat16, float16, got 'int8'",
        ),
        (["generate", "m", "hi", "--kv-dtype", "int8"], "kv-dtype: expected one of auto, fp8, got 'int8'"),
        (["generate", "m", "hi", "--stop", ""], "stop: expected non-empty strings"),
        (["generate", "m", "hi", "-n", "2", "--stream"], "--stream shows one sample"),
        (["generate", "m", "--prompts", "/no/such/file"], "/no/such/file"),
        (["generate", "m", "hi", "--logit-bias", "7"], "logit_bias: expected ID=NUMBER, got 7"),
        (["generate", "m", "hi", "--min-tokens", "-1"], "min_tokens: expected at least 0"),
        (["generate", "m", "hi", "--repetition-penalty", "0"], "repetition_penalty: expected more than 0"),
        (["generate", "m", "hi", "--logprobs", "2"], "--logprobs and --prompt-logprobs are shown by --json only"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(run, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.status == 2 and message in result.error and result.out == ""


def test_failures_are_one_line_and_status_1(run, generate, tmp_path: Path) -> None:
    for result, message in [
        (run("generate", "/no/such/model", "hi"), "unknown model '/no/such/model'"),
        (generate("hi", "--drafter", "nobody/nothing"), "drafter: expected"),
        (run("generate", "/no/such/model", "hi", "--drafter", "foo"), "drafter: expected"),  # before anything is loaded
        (generate("hi", "--device", "tpu"), "device: expected"),
        (generate("hi " * 100, "--raw"), "prompt: expected at most 127 tokens"),
    ]:
        assert result.status == 1 and message in result.error


def test_an_interrupt_is_said_and_status_130(generate, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.cli._print_pieces", pressed)
    result = generate("hi")
    assert result.status == 130 and result.error == "interrupted"


def test_equal_samples_are_told(generate) -> None:
    note = "specdec: note: the 2 samples of a prompt are equal, because decoding is greedy"
    assert note in generate("hi", "-n", 2, "--temperature", 0).err
    assert "note" not in generate("hi", "-n", 2, "--temperature", 1).err + generate("hi", "--temperature", 0).err


def test_one_bad_prompt_fails_alone(generate) -> None:
    for more in (["--stream"], ["--no-stream"]):
        result = generate("hi", "hi " * 100, "hi", "--raw", *more)
        assert result.status == 1 and "specdec: error: prompt 2: prompt: expected at most" in result.err
        assert "14 tokens in" in result.err


def test_debug_shows_the_traceback(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown model"):
        main(["generate", "/no/such/model", "hi"])


def test_module_and_version() -> None:
    out = subprocess.run([sys.executable, "-m", "specdec", "--version"], capture_output=True, text=True, check=True)
    assert out.stdout == f"specdec {specdec.__version__}\n" and out.stderr == ""


def test_a_process_of_its_own_prints_nothing_else(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specdec", "generate", tiny, "hi", "--json", "--max-tokens", "3"]
    environment = os.environ | {"SPECDEC_CACHE": str(tmp_path)}
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment) for _ in range(2)
    )
    assert json.loads(first.stdout)["outputs"][0]["text"] == json.loads(second.stdout)["outputs"][0]["text"]
    told, nothing = said_by_us(first.stderr), said_by_us(second.stderr)
    assert told.startswith("specdec: converting ") and told.count("\n") == 1 and nothing == ""


def test_help_without_a_command(run) -> None:
    result = run()
    assert result.status == 0 and "generate" in result.out
