"""Prompt files of every kind, good and bad."""

import json
from pathlib import Path

import pytest

from specdec.prompt_file import Prompt, read_prompts


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_json_lines_of_every_kind(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello"}
    file = write(
        tmp_path / "a.jsonl",
        {"task": "maths", "prompt": "1 + 1?"},
        "",
        '"plain string"',
        {"messages": [system, user, answer, user]},
        {"id": 7, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    )
    assert read_prompts(file) == [
        Prompt("1 + 1?", "maths"),
        Prompt("plain string"),
        Prompt([system, user, answer, user]),
        Prompt([user]),
    ]


def test_sharegpt_list(tmp_path: Path) -> None:
    turns = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    file = write(
        tmp_path / "share.json", json.dumps([{"conversations": turns}, {"conversations": turns[1:2]}], indent=1)
    )
    contents = [prompt.content for prompt in read_prompts(file)]
    assert contents[0] == [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    assert contents[1] == [{"role": "user", "content": "Q"}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['"ok"', "", '{"prompt": '], "line 3: expected JSON"),
        (['"ok"', '{"prompt": 3}'], "line 2: expected a string"),
        (['{"text": "a"}'], "line 1: expected a string"),
        (['{"prompt": "a", "messages": []}'], "line 1: expected a string"),
        (['"ok"', "17"], "line 2: expected a string"),
        (['""'], "line 1: expected a string"),
        (['{"prompt": "a", "task": 5}'], "line 1: task: expected a string"),
        (['{"messages": [{"role": "user"}]}'], 'line 1: expected turns with "role"'),
        (['{"messages": []}'], "line 1: expected a list of turns"),
        (['{"conversations": [{"from": "robot", "value": "a"}]}'], "line 1: from: expected one of human, user, system"),
        (['{"prompt": null}'], "line 1: expected a string"),
        (['{"conversations": ["hi"]}'], 'line 1: expected turns with "from"'),
        (['{"conversations": []}'], "line 1: expected a list of turns"),
        (['{"conversations": [{"from": "gpt", "value": "a"}]}'], "line 1: expected a conversation that a user opens"),
        (['[{"prompt": "a"}, {"prompt": null}]'], "line 1 (entry 2): expected a string"),
        (
            ["[", ' {"prompt": "a [b]"},', "", ' {"prompt": ["x", {}]}, {"prompt": "c"}]'],
            "line 4 (entry 2): expected a string",
        ),
        (['[{"prompt": "a"},', "{]"], "line 2: expected JSON"),
        (['"ok"', "[" * 10_000 + "]" * 10_000], "line 2: expected JSON of a prompt"),
        (['"ok"', '{"prompt": ' + "9" * 5000 + "}"], "line 2: expected JSON of a prompt"),
        (['"ok"', r'{"prompt": "\ud83d"}'], r"line 2: expected text, got half a character, '\ud83d'"),
        (["[]"], "expected at least one prompt, got none"),
        ([" ", ""], "expected at least one prompt, got none"),
    ],
)
def test_bad_file_names_the_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_prompts(write(tmp_path / "bad.jsonl", *lines))
    assert message in str(error.value) and "bad.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one", "", "  two é", '{"prompt": "as it stands"}')
    assert read_prompts(file) == [Prompt("one"), Prompt("  two é"), Prompt('{"prompt": "as it stands"}')]
    with pytest.raises(ValueError, match="a.txt: expected at least one prompt, got none"):
        read_prompts(write(tmp_path / "a.txt", "", " "))


def test_what_a_conversation_asks() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert Prompt("x").text == "x" and Prompt(turns).text == "b"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'"ok"\n\xff')
    with pytest.raises(ValueError, match="expected UTF-8 text, got byte 0xff"):
        read_prompts(tmp_path / "a.jsonl")
    with pytest.raises(OSError):
        read_prompts(tmp_path / "missing.jsonl")


def test_what_other_systems_write(tmp_path: Path) -> None:
    """A byte order mark, CR LF, a suffix in capitals, and characters that Python takes for the end of a line."""
    file = tmp_path / "a.JSONL"
    file.write_bytes('\ufeff{"prompt": "one"}\r\n\r\n{"prompt": "two\u2028\x85lines"}\r\n'.encode())
    assert read_prompts(file) == [Prompt("one"), Prompt("two\u2028\x85lines")]
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffone\r\ntwo\u2028\x0cends\r\n".encode())
    assert read_prompts(file) == [Prompt("one"), Prompt("two\u2028\x0cends")]
