"""Where a model's weights are: on one device, or spread by accelerate's hooks over several and over the host's memory."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that token ids go to: where the embedding runs, which need not be where its weight waits."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):  # one, or a sequence of them
        where = getattr(part, "execution_device", None)
        if where is not None:
            return torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
    return embedding.weight.device


def refuse_empty(model: PreTrainedModel) -> None:
    """Raises ValueError for weights on the meta device that no hook will fetch: they have no values."""
    for name, module in model.named_modules():
        empty = [n for n, parameter in module.named_parameters(recurse=False) if parameter.is_meta]
        if empty and not hasattr(module, "_hf_hook"):
            raise ValueError(f"model: expected weights with values, got {name}.{empty[0]} on the meta device")


def is_spread(model: PreTrainedModel) -> bool:
    """Whether the weights are on several devices or wait elsewhere than where they are used."""
    found = {parameter.device for parameter in model.parameters()}
    return len(found) > 1 or torch.device("meta") in found
