"""Left-padded batches for the plug-in's tests, and what transformers itself makes of them."""

from __future__ import annotations

import functools

import torch
from support import VOCAB, tiny
from torch import Tensor

PAD = 0
LENGTHS = (7, 1, 19, 12)
NEW = 12


def batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> dict[str, Tensor]:
    """input_ids and attention_mask, padded at the left. The tokens of a row recur, so that look-up finds matches."""
    draw = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros(len(lengths), width, dtype=torch.long)
    for r, n in enumerate(lengths):
        period = torch.randint(1, VOCAB, (5,), generator=draw)
        ids[r, width - n :] = period.repeat(n)[:n]
        mask[r, width - n :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def own(name: str = "llama", inputs: dict[str, Tensor] | None = None, **kwargs) -> Tensor:
    """What transformers' own `generate` gives on a model that was never enabled."""
    if inputs is None and not kwargs:
        return _text(name).clone()
    return tiny(name).generate(**(inputs or batch()), **{"do_sample": False, "max_new_tokens": NEW, **kwargs})


@functools.cache
def _text(name: str) -> Tensor:
    return tiny(name).generate(**batch(), do_sample=False, max_new_tokens=NEW)


def an_end(name: str = "llama", row: int = 0, at: int = 4) -> int:
    """A token that greedy decoding emits in that row, as its `at`-th: an end token that is met within the text."""
    inputs = batch()
    return int(own(name, inputs)[row, inputs["input_ids"].shape[1] + at])
