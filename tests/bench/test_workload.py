"""Prompts as token ids, and the batches that are made of them."""

from dataclasses import replace

import pytest
import torch

from specdec.bench.inputs import _random, _real, _warnings
from specdec.bench.settings import Settings
from specdec.bench.shapes import random_model
from specdec.bench.workload import SHIPPED, Workload, random_workload, tokenized
from specdec.prompt_file import Prompt, read_prompts


def test_shipped_set_covers_its_tasks() -> None:
    tasks = [request.task for request in read_prompts(SHIPPED)]
    assert set(tasks) == {"chat", "translation", "summary", "qa", "maths", "retrieval", "code editing"}
    assert min(tasks.count(task) for task in tasks) >= 3


def test_batches_are_full_and_cover_everything() -> None:
    workload = Workload("w", ["a"] * 5, [[1], [2], [3], [4], [5, 6]])
    assert workload.batches(1) == [[0], [1], [2], [3], [4]]
    assert workload.batches(2) == [[0, 1], [2, 3], [4, 0]]
    assert workload.batches(8) == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert workload.longest == 2 and workload.median_len == 1
    single = Workload("w", ["a"] * 5, [[1], [2], [3], [4], [5, 6]], single=True)
    assert [single.batches(size) for size in (1, 2, 5)] == [[[0]], [[0, 1]], [[0, 1, 2, 3, 4]]]


def test_hash_depends_on_the_tokens_alone() -> None:
    one = Workload("w", ["a"], [[1, 2]])
    assert one.sha256 == Workload("other", ["b"], [[1, 2]]).sha256 != Workload("w", ["a"], [[1, 3]]).sha256


def test_random_prompts_are_reproducible_and_in_range() -> None:
    workload = random_workload(33, 4, 97, seed=3)
    assert workload.prompts == random_workload(33, 4, 97, seed=3).prompts != random_workload(33, 4, 97, seed=4).prompts
    assert workload.random and all(len(p) == 33 and min(p) >= 10 and max(p) < 97 for p in workload.prompts)
    assert random_workload(5, 1, 4).prompts[0] == [3] * 5


def test_random_prompts_are_one_batch_of_each_size_unless_told_otherwise() -> None:
    model = random_model("tiny", torch.float32, torch.device("cpu"))
    settings = Settings("tiny", random_weights=True, input_lens=(8, 9), output_len=2, batch=(1, 4))
    for limit, batches in ((None, [1, 1]), (6, [6, 2])):
        for workload in _random(replace(settings, limit=limit), model):
            assert [len(workload.batches(size)) for size in settings.batch] == batches


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
    requests = [Prompt("one two", "a"), Prompt("x " * 9, "b"), Prompt([{"role": "user", "content": "hey"}], "c")]
    workload = tokenized("w", requests, Chatty(), max_len=5)
    assert workload.prompts == [[4, 3, 3], [4, 3]] and workload.tasks == ["a", "c"] and workload.dropped == 1
    assert tokenized("w", requests[:1], Words(), None).prompts == [[3, 3]]
    with pytest.raises(ValueError, match="no chat template"):
        tokenized("w", requests, Words(), None)
    with pytest.raises(ValueError, match="prompts: expected some of 1 to 1 tokens, got none in w"):
        tokenized("w", requests, Chatty(), max_len=1)


def test_a_cpu_asks_one_of_each_task_unless_told_otherwise() -> None:
    requests, model = read_prompts(SHIPPED), random_model("tiny", torch.float32, torch.device("cpu"))

    def asked(**changes) -> Workload:
        return _real(Settings("m", output_len=2, **changes), requests, model, Words())[0]

    workload = asked()
    assert len(workload.prompts) == len(set(workload.tasks)) == 7
    (warning,) = _warnings(Settings("m"), [workload], len(requests))
    assert warning == f"on a CPU the first 7 of {len(requests)} prompts are asked; --limit {len(requests)} asks all"
    assert len(asked(batch=(1, 9)).prompts) == 9 and len(asked(limit=3).prompts) == 3
    assert list(_warnings(Settings("m", limit=3), [asked(limit=3)], len(requests))) == []
