"""Which adapters of a model are active: switching them changes what it computes, and no weight tells of it."""

from __future__ import annotations

from torch import nn


def active_adapters(model: nn.Module) -> list[tuple]:
    """For each layer that peft has put into `model`: its active and its merged adapters, and whether they are disabled."""
    layers = (m for m in model.modules() if hasattr(type(m), "merged_adapters"))
    return [(tuple(m.active_adapters), tuple(m.merged_adapters), m.disable_adapters) for m in layers]  # type: ignore
