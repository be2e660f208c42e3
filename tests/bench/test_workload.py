"""Prompt files, good and bad, and the batches that are made of them."""

import json
from pathlib import Path

import pytest
import torch

from specdec.bench.inputs import _real, _warnings
from specdec.bench.settings import Settings
from specdec.bench.shapes import random_model
from specdec.bench.workload import SHIPPED, Request, Workload, random_workload, read_requests, tokenized


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_json_lines_of_every_kind(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"task": "maths", "prompt": "1 + 1?"},
        "",
        '"plain string"',
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        {"id": 7, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    )
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert read_requests(file) == [
        Request("maths", "1 + 1?"),
        Request("all", "plain string"),
        Request("all", [system, user]),
        Request("all", [user]),
    ]


def test_sharegpt_list(tmp_path: Path) -> None:
    turns = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    file = write(
        tmp_path / "share.json", json.dumps([{"conversations": turns}, {"conversations": turns[1:2]}], indent=1)
    )
    contents = [request.content for request in read_requests(file)]
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
        (['{"messages": [{"role": "robot", "content": "a"}]}'], 'line 1: expected turns with "role"'),
        (['{"conversations": ["hi"]}'], 'line 1: expected turns with "from"'),
        (['{"conversations": []}'], "line 1: expected a conversation that a user opens"),
        (['{"conversations": [{"from": "gpt", "value": "a"}]}'], "line 1: expected a conversation that a user opens"),
        (['[{"prompt": "a"}, {"prompt": null}]'], "line 1 (entry 2): expected a string"),
        (
            ["[", ' {"prompt": "a [b]"},', "", ' {"prompt": ["x", {}]}, {"prompt": "c"}]'],
            "line 4 (entry 2): expected a string",
        ),
        (['[{"prompt": "a"},', "{]"], "line 2: expected JSON"),
        (["[]"], "expected at least one prompt, got none"),
        ([" ", ""], "expected at least one prompt, got none"),
    ],
)
def test_bad_file_names_the_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_requests(write(tmp_path / "bad.jsonl", *lines))
    assert message in str(error.value) and "bad.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'"ok"\n\xff')
    with pytest.raises(ValueError, match="expected UTF-8 text, got byte 0xff"):
        read_requests(tmp_path / "a.jsonl")
    with pytest.raises(OSError):
        read_requests(tmp_path / "missing.jsonl")


def test_shipped_set_covers_its_tasks() -> None:
    tasks = [request.task for request in read_requests(SHIPPED)]
    assert set(tasks) == {"chat", "translation", "summary", "qa", "maths", "retrieval", "code editing"}
    assert min(tasks.count(task) for task in tasks) >= 3


def test_batches_are_full_and_cover_everything() -> None:
    workload = Workload("w", ["a"] * 5, [[1], [2], [3], [4], [5, 6]])
    assert workload.batches(1) == [[0], [1], [2], [3], [4]]
    assert workload.batches(2) == [[0, 1], [2, 3], [4, 0]]
    assert workload.batches(8) == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert workload.longest == 2 and workload.median_len == 1


def test_hash_depends_on_the_tokens_alone() -> None:
    one = Workload("w", ["a"], [[1, 2]])
    assert one.sha256 == Workload("other", ["b"], [[1, 2]]).sha256 != Workload("w", ["a"], [[1, 3]]).sha256


def test_random_prompts_are_reproducible_and_in_range() -> None:
    workload = random_workload(33, 4, 97, seed=3)
    assert workload.prompts == random_workload(33, 4, 97, seed=3).prompts != random_workload(33, 4, 97, seed=4).prompts
    assert workload.random and all(len(p) == 33 and min(p) >= 10 and max(p) < 97 for p in workload.prompts)
    assert random_workload(5, 1, 4).prompts[0] == [3] * 5


class Words:
    """A tokenizer of ten lines: every word is its length."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


class Chatty(Words):
    chat_template = "yes"

    def apply_chat_template(self, messages: list, add_generation_prompt: bool, tokenize: bool) -> str:
        return " ".join(m["role"] + " " + m["content"] for m in messages)


def test_tokenized_uses_the_template_and_drops_what_is_too_long() -> None:
    requests = [Request("a", "one two"), Request("b", "x " * 9), Request("c", [{"role": "user", "content": "hey"}])]
    workload = tokenized("w", requests, Chatty(), max_len=5)
    assert workload.prompts == [[4, 3, 3], [4, 3]] and workload.tasks == ["a", "c"] and workload.dropped == 1
    assert tokenized("w", requests[:1], Words(), None).prompts == [[3, 3]]
    with pytest.raises(ValueError, match="no chat template"):
        tokenized("w", requests, Words(), None)
    with pytest.raises(ValueError, match="prompts: expected some of 1 to 1 tokens, got none in w"):
        tokenized("w", requests, Chatty(), max_len=1)


def test_a_cpu_asks_one_of_each_task_unless_told_otherwise() -> None:
    requests, model = read_requests(SHIPPED), random_model("tiny", torch.float32, torch.device("cpu"))

    def asked(**changes) -> Workload:
        return _real(Settings("m", output_len=2, **changes), requests, model, Words())[0]

    workload = asked()
    assert len(workload.prompts) == len(set(workload.tasks)) == 7
    (warning,) = _warnings(Settings("m"), [workload], len(requests))
    assert warning == f"on a CPU the first 7 of {len(requests)} prompts are asked; --limit {len(requests)} asks all"
    assert len(asked(batch=(1, 9)).prompts) == 9 and len(asked(limit=3).prompts) == 3
    assert list(_warnings(Settings("m", limit=3), [asked(limit=3)], len(requests))) == []
