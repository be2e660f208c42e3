"""Rotary angles that follow the text's length (dynamic NTK, longrope), held at those of the original positions.

In every forward transformers compares the length of the longest text with the original positions: on the host, which no CUDA
graph can hold, or by writing over the frequencies. Paged texts stay within these positions (`limits.max_positions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

_FIXED = "default"
"""transformers' name of the angles that no forward changes."""


class HeldRotary(NamedTuple):
    """A rotary module, and its attributes in a paged forward: the kind of angles, and the frequencies."""

    module: nn.Module
    attributes: dict[str, Any]


def rotary_of(model: nn.Module) -> list[HeldRotary]:
    """The modules of `model` whose angles follow the text's length, for all layers or for layers of a type.

    Their frequencies are copies, at one address whatever the module does with its own: graphs hold on to them.
    """
    return [HeldRotary(module, found) for module in model.modules() if (found := _attributes(module))]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Those to hold, by the names that the module's forward reads; none for other modules."""
    kind = getattr(module, "rope_type", None)
    kinds = kind if isinstance(kind, dict) else {"": kind}
    following = {layer: f"{layer}_" if layer else "" for layer, k in kinds.items() if _follows(k)}
    if not following or not all(hasattr(module, f"{prefix}original_inv_freq") for prefix in following.values()):
        return {}
    fixed = kinds | dict.fromkeys(following, _FIXED)
    found: dict[str, Any] = {"rope_type": fixed if isinstance(kind, dict) else _FIXED}
    for prefix in following.values():
        own, original = getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}original_inv_freq")
        found[f"{prefix}inv_freq"] = original.to(own, copy=True)  # transformers may have left it on another device
    return found


def _follows(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


@contextmanager
def held(rotary: Sequence[HeldRotary]) -> Iterator[None]:
    """Within it these modules have the original angles, whatever the positions; after it they are as they were."""
    before = [{name: getattr(module, name) for name in attributes} for module, attributes in rotary]
    try:
        for module, attributes in rotary:
            _set(module, attributes)
        yield
    finally:
        for (module, _), attributes in zip(rotary, before, strict=True):
            _set(module, attributes)


def _set(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(module, name, value)
