"""What is asked of every method: prompts as token ids, from a file, from the set that ships, or random tokens."""

from __future__ import annotations

import hashlib
import json
import random
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]
SHIPPED = Path(__file__).with_name("prompts.jsonl")
_SPEAKERS = {"human": "user", "user": "user", "system": "system", "gpt": "assistant", "assistant": "assistant"}
_GAP = re.compile(r"[\s,]*")
_EXPECTED = 'expected a string, {"prompt": "..."}, {"messages": [...]} or {"conversations": [...]}'


@dataclass(frozen=True)
class Request:
    """One prompt of a set before it is tokens: text or a conversation, and the task that it belongs to."""

    task: str
    content: str | list[Message]


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, with the task of each.

    random: tokens without meaning, which mislead speculation. dropped: prompts left out as too long.
    """

    name: str
    tasks: list[str]
    prompts: list[list[int]]
    random: bool = False
    dropped: int = 0

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
        return [[i % count for i in range(start, start + size)] for start in range(0, count, size)]


def random_workload(length: int, count: int, vocab_size: int, seed: int = 0) -> Workload:
    """`count` prompts of `length` uniformly drawn tokens, the first ten ids (often special ones) left out."""
    rng = random.Random(f"{seed} {length}")
    prompts = [[rng.randrange(min(10, vocab_size - 1), vocab_size) for _ in range(length)] for _ in range(count)]
    return Workload(f"{length} random tokens", ["random"] * count, prompts, random=True)


def read_requests(path: Path) -> list[Request]:
    """The prompts of a file: JSON lines, or a JSON list as ShareGPT's files are.

    An entry is a string, or an object with "prompt", "messages" (role, content) or "conversations" (from, value); of a
    conversation what precedes the first answer is asked. An object may name its "task".
    Raises ValueError naming file and line (in a JSON list: where the entry begins), OSError if the file can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from None
    entries = _list_entries(path, text) if text.lstrip().startswith("[") else _line_entries(path, text)
    if not entries:
        raise ValueError(f"{path}: expected at least one prompt, got none")
    return [_request(value, where) for where, value in entries]


def _list_entries(path: Path, text: str) -> list[tuple[str, Any]]:
    """A JSON list read entry by entry, so that each keeps its line. json.loads has found it whole before."""
    _json(text, path)
    decoder, entries, at = json.JSONDecoder(), list[tuple[str, Any]](), text.index("[") + 1
    while text[at := _after(_GAP, text, at)] != "]":
        value, end = decoder.raw_decode(text, at)
        entries.append((f"{path}, line {1 + text.count(chr(10), 0, at)} (entry {len(entries) + 1})", value))
        at = end
    return entries


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _line_entries(path: Path, text: str) -> list[tuple[str, Any]]:
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [(f"{path}, line {i}", _json(line, path, i)) for i, line in lines]


def _json(text: str, path: Path, line: int = 0) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {line or error.lineno}: expected JSON, {error.msg} at column {error.colno}"
        ) from None


def _request(value: Any, where: str) -> Request:
    fields = value if isinstance(value, dict) else {"prompt": value}
    kinds = [name for name in ("prompt", "messages", "conversations") if name in fields]
    if len(kinds) != 1:
        raise ValueError(f"{where}: {_EXPECTED}, got {json.dumps(value, ensure_ascii=False)[:60]}")
    content = fields[kinds[0]]
    task = fields.get("task", "all")
    if not isinstance(task, str):
        raise ValueError(f"{where}: task: expected a string, got {task!r}")
    if kinds == ["prompt"]:
        if not isinstance(content, str) or not content:
            raise ValueError(f"{where}: {_EXPECTED}, got {json.dumps(value, ensure_ascii=False)[:60]}")
        return Request(task, content)
    return Request(
        task, _opening(content, where, *(("role", "content") if kinds == ["messages"] else ("from", "value")))
    )


def _opening(turns: Any, where: str, speaker: str, said: str) -> list[Message]:
    """The turns before the first answer, as messages."""
    messages: list[Message] = []
    for turn in turns if isinstance(turns, list) else []:
        who = turn.get(speaker) if isinstance(turn, dict) else None
        if who not in _SPEAKERS or not isinstance(turn.get(said), str):
            known = ", ".join(_SPEAKERS)
            raise ValueError(
                f'{where}: expected turns with "{speaker}" (one of {known}) and "{said}", got {str(turn)[:60]}'
            )
        if _SPEAKERS[who] == "assistant":
            break
        messages.append({"role": _SPEAKERS[who], "content": turn[said]})
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"{where}: expected a conversation that a user opens, got {str(turns)[:60]}")
    return messages


def tokenized(name: str, requests: list[Request], tokenizer: Any, max_len: int | None) -> Workload:
    """The requests as token ids, without those of more than `max_len` tokens.

    Text goes through the tokenizer's chat template where it has one. Raises ValueError if nothing is left, or for a
    conversation without a template.
    """
    tasks, prompts = list[str](), list[list[int]]()
    for request in requests:
        ids = _encode(request.content, tokenizer)
        if ids and (max_len is None or len(ids) <= max_len):
            tasks.append(request.task)
            prompts.append(ids)
    if not prompts:
        raise ValueError(f"prompts: expected some of 1 to {max_len} tokens, got none in {name}")
    return Workload(name, tasks, prompts, dropped=len(requests) - len(prompts))


def _encode(content: str | list[Message], tokenizer: Any) -> list[int]:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(content, str) and not template:
        return tokenizer(content)["input_ids"]
    if not template:
        raise ValueError("prompts: this model's tokenizer has no chat template; expected text, got conversations")
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template brings its own BOS
