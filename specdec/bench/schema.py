"""The document's fields as a JSON Schema, for readers in other languages: specdec/bench/schema.json.

    python -m specdec.bench.schema > specdec/bench/schema.json

writes it anew from the dataclasses; a test holds the two together.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from specdec.bench.document import SCHEMA, Document, is_required

_PLAIN = {float: "number", int: "integer", str: "string", bool: "boolean", type(None): "null"}


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of what `Document.to_json` writes."""
    parts: dict[str, Any] = {}
    top = _dataclass(Document, parts)
    top["properties"]["schema"] = {"const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A document of specdec bench, {SCHEMA}",
        "description": "docs/benchmarking.md explains each field.",
        **top,
        "$defs": dict(sorted(parts.items())),
    }


def _of(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type; those of dataclasses go to `parts` and are referred to."""
    if is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in parts:
            parts[name] = {}
            parts[name] |= _dataclass(kind, parts)
        return {"$ref": f"#/$defs/{name}"}
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of(choice, parts) for choice in inner]}
    if origin is list:
        return {"type": "array", "items": _of(inner[0], parts)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(inner[1], parts)}
    return {} if kind is Any else {"type": _PLAIN[kind]}


def _dataclass(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {
        "type": "object",
        "properties": {field.name: _of(hints[field.name], parts) for field in fields(kind)},
        "required": [field.name for field in fields(kind) if is_required(field) or field.name == "schema"],
        "additionalProperties": False,
    }


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=1))
