"""What is asked of every method: prompts as token ids, from a file, from the set that ships, or random tokens."""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.prompt_file import Message, Prompt

SHIPPED = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, with the task of each.

    random: tokens without meaning, which mislead speculation. dropped: prompts left out as too long.
    single: one batch of each size is enough, since the prompts are alike.
    """

    name: str
    tasks: list[str]
    prompts: list[list[int]]
    random: bool = False
    dropped: int = 0
    single: bool = False

    @property
    def sha256(self) -> str:
        """Of the token ids: two results are comparable only if theirs agree."""
        text = json.dumps(self.prompts, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))

    @property
    def median_len(self) -> float:
        return statistics.median(map(len, self.prompts))

    def batches(self, size: int) -> list[list[int]]:
        """Prompt numbers in groups of exactly `size`; the last group is filled up from the beginning."""
        count = len(self.prompts)
        starts = [0] if self.single else range(0, count, size)
        return [[i % count for i in range(start, start + size)] for start in starts]


def random_workload(length: int, count: int, vocab_size: int, seed: int = 0) -> Workload:
    """`count` prompts of `length` uniformly drawn tokens, the first ten ids (often special ones) left out."""
    rng = random.Random(f"{seed} {length}")
    prompts = [[rng.randrange(min(10, vocab_size - 1), vocab_size) for _ in range(length)] for _ in range(count)]
    return Workload(f"{length} random tokens", ["random"] * count, prompts, random=True)


def tokenized(name: str, asked: list[Prompt], tokenizer: Any, max_len: int | None) -> Workload:
    """The prompts as token ids, without those of more than `max_len` tokens.

    Text goes through the tokenizer's chat template where it has one. Raises ValueError if nothing is left, or for a
    conversation without a template.
    """
    tasks, prompts = list[str](), list[list[int]]()
    for prompt in asked:
        ids = _encode(prompt.content, tokenizer)
        if ids and (max_len is None or len(ids) <= max_len):
            tasks.append(prompt.task)
            prompts.append(ids)
    if not prompts:
        raise ValueError(f"prompts: expected some of 1 to {max_len} tokens, got none in {name}")
    return Workload(name, tasks, prompts, dropped=len(asked) - len(prompts))


def _encode(content: str | list[Message], tokenizer: Any) -> list[int]:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(content, str) and not template:
        return tokenizer(content)["input_ids"]
    if not template:
        raise ValueError("prompts: this model's tokenizer has no chat template; expected text, got conversations")
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template brings its own BOS
