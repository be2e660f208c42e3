"""Prompts from a file: text, one prompt a line, or JSON lines. Knows nothing of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Message = dict[str, str]
Request = str | list[Message]


def read_prompts(path: Path) -> list[Request]:
    """The prompts of `path`: strings, or conversations as lists of messages.

    *.jsonl: every line a string, an object with "prompt", or one with "messages". Any other file: every line that is
    not blank is a prompt. Raises ValueError naming the file and the line, OSError if it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path}: expected at least one prompt, got an empty file")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_parse(line, f"{path}, line {number}") for number, line in numbered]


def _parse(line: str, where: str) -> Request:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected JSON, {error.msg} at column {error.colno}") from None
    if isinstance(value, dict) and len(value.keys() & {"prompt", "messages"}) == 1:
        value = value.get("prompt", value.get("messages"))
    if isinstance(value, str) or _is_conversation(value):
        return value
    raise ValueError(
        f'{where}: expected a string, {{"prompt": "..."}} or {{"messages": [...]}}, got {line.strip()[:60]}'
    )


def _is_conversation(value: Any) -> bool:
    """A list of messages, each with a role and a content, both strings."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )  # fmt: skip
