"""The host's twin of the look-up kernel: a row at a time, the latest candidates first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CANDIDATES = 512
"""Candidates compared at once: text that repeats itself has its answer among the latest ones."""


def match(history: Tensor, num_tokens: Tensor, k: int, max_match: int, min_match: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec.kernels.match.match`."""
    table = history.numpy(force=True)
    drafts = np.zeros((len(table), k), dtype=np.int64)
    found = np.zeros((2, len(table)), dtype=np.int64)
    for r, l in enumerate(num_tokens.tolist()):
        length, end = _longest(table[r, :l], max_match)
        if length >= min_match:
            # What follows the match, and past the newest token the copied text again: a period of l - 1 - end tokens.
            drafts[r] = np.resize(table[r, end + 1 : l], k)
            found[:, r] = k, length
    counts, lengths = torch.from_numpy(found).to(history.device)
    return torch.from_numpy(drafts).to(history.device), counts, lengths


def _longest(text: np.ndarray, max_match: int) -> tuple[int, int]:
    """Length and end of the longest, then latest, earlier match of the newest tokens of `text`; (0, 0) for none."""
    if len(text) < 2:
        return 0, 0
    best = (0, 0)
    back = np.arange(min(max_match, len(text) - 1))
    newest = text[len(text) - 1 - back]
    ends = np.flatnonzero(text[:-1] == text[-1])[::-1]
    for start in range(0, len(ends), CANDIDATES):
        at = ends[start : start + CANDIDATES, None] - back
        differs = (text[at] != newest) | (at < 0)  # a negative index reads the end of the text: harmless
        lengths = np.where(differs.any(1), differs.argmax(1), len(back))
        longest = int(lengths.argmax())
        if lengths[longest] > best[0]:
            best = int(lengths[longest]), int(ends[start + longest])
        if best[0] == len(back):
            break
    return best
