"""Prompts from a file: text, one prompt a line, JSON lines, or a JSON list. Knows nothing of models."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]
_SPEAKERS = {"human": "user", "user": "user", "system": "system", "gpt": "assistant", "assistant": "assistant"}
_GAP = re.compile(r"[\s,]*")
_EXPECTED = 'expected a string, {"prompt": "..."}, {"messages": [...]} or {"conversations": [...]}'


@dataclass(frozen=True)
class Prompt:
    """content: text, or a conversation as messages with "role" and "content". task: what it stands for in a set."""

    content: str | list[Message]
    task: str = "all"

    @property
    def text(self) -> str:
        """The content, or what the last message says."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of `path`.

    *.jsonl, *.json: JSON lines, or a JSON list as ShareGPT's files are. An entry is a string, or an object with "prompt", with
    "messages" (role, content), asked as they stand, or with "conversations" (from, value), of which what precedes the first
    answer is asked. An object may name its "task". Any other file: every line that is not blank is a prompt.
    Raises ValueError naming file and line (in a list: where the entry begins), OSError if the file can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows begins files with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from None
    if path.suffix.lower() not in (".json", ".jsonl"):
        prompts = [Prompt(line) for line in text.split("\n") if line.strip()]
    else:
        entries = _list_entries(path, text) if text.lstrip().startswith("[") else _line_entries(path, text)
        prompts = [_prompt(value, where) for where, value in entries]
    if not prompts:
        raise ValueError(f"{path}: expected at least one prompt, got none")
    return prompts


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
    # Not splitlines: JSON may hold characters that it takes for the end of a line, such as U+2028.
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [(f"{path}, line {i}", _json(line, path, i)) for i, line in lines]


def _json(text: str, path: Path, line: int = 0) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {line or error.lineno}: expected JSON, {error.msg} at column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists thousands deep
        at = f"{path}, line {line}" if line else str(path)
        raise ValueError(f"{at}: expected JSON of a prompt, {error}") from None


def _prompt(value: Any, where: str) -> Prompt:
    fields = value if isinstance(value, dict) else {"prompt": value}
    kinds = [name for name in ("prompt", "messages", "conversations") if name in fields]
    content = fields[kinds[0]] if len(kinds) == 1 else None
    _check_text(value, where)
    if content is None or (kinds == ["prompt"] and not (isinstance(content, str) and content)):
        raise ValueError(f"{where}: {_EXPECTED}, got {json.dumps(value, ensure_ascii=False)[:60]}")
    task = fields.get("task", "all")
    if not isinstance(task, str):
        raise ValueError(f"{where}: task: expected a string, got {task!r}")
    if kinds == ["messages"]:
        content = _turns(content, where, "role", "content")
    elif kinds == ["conversations"]:
        content = _opening(_turns(content, where, "from", "value"), where)
    return Prompt(content, task)


def _check_text(value: Any, where: str) -> None:
    """Half a surrogate pair, which JSON can spell, is no text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: expected text, got half a character, {error.object[error.start]!a}") from None


def _turns(turns: Any, where: str, speaker: str, said: str) -> list[Message]:
    """`turns` with "role" and "content" for the fields `speaker` and `said`."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: expected a list of turns, got {str(turns)[:60]}")
    for turn in turns:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in (speaker, said)):
            raise ValueError(f'{where}: expected turns with "{speaker}" and "{said}", got {str(turn)[:60]}')
    return [{"role": turn[speaker], "content": turn[said]} for turn in turns]


def _opening(turns: list[Message], where: str) -> list[Message]:
    """The turns before the first answer, their speakers by the names that chat templates know."""
    messages = list[Message]()
    for turn in turns:
        if turn["role"] not in _SPEAKERS:
            known = ", ".join(_SPEAKERS)
            raise ValueError(f'{where}: from: expected one of {known}, got "{turn["role"][:40]}"')
        if _SPEAKERS[turn["role"]] == "assistant":
            break
        messages.append({"role": _SPEAKERS[turn["role"]], "content": turn["content"]})
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"{where}: expected a conversation that a user opens, got {str(turns)[:60]}")
    return messages
