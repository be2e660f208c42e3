"""Look-up drafting: copy what followed the longest earlier occurrence of a row's newest tokens, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.backend import on_device, use_triton
from specdec.kernels.check import INTS, check
from specdec.kernels.reference import match as reference


def match(
    history: Tensor, num_tokens: Tensor, *, k: int, max_match: int = 16, min_match: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft k tokens for each row by the longest suffix match in the row itself.

    history [R, W] int32 or int64: row r's first num_tokens[r] (>= 1) entries are its tokens, the rest is never used.
    A match of n tokens at e (e < l - 1) means that the n tokens up to e equal the n newest ones; n counts up to
    max_match, the longest wins, of equals the latest. Draft j is the token at e + 1 + j; past the newest token the
    copied text is copied again, so a periodic tail goes on with its period.

    Returns drafts [R, k], counts [R] (k, or 0 where no match has min_match tokens) and match lengths [R] (or 0), int64.
    Raises ValueError for tensors that don't fit. Prompt lookup is Saxena's (2023), the longest match SuffixDecoding's.
    """
    check("history", history, (None, None), INTS, unit_stride=True)
    check("num_tokens", num_tokens, (history.shape[0],), INTS, history.device)
    for name, value in (("k", k), ("max_match", max_match), ("min_match", min_match)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if not use_triton(history):
        return reference.match(history, num_tokens, k, max_match, min_match)
    rows = history.shape[0]
    drafts = torch.empty(rows, k, dtype=torch.int64, device=history.device)
    counts, lengths = torch.empty_like(drafts[:, 0]), torch.empty_like(drafts[:, 0])
    if rows:
        with on_device(history):
            _match[(rows,)](
                history, num_tokens, drafts, counts, lengths, history.stride(0), k, min_match,
                MAX_MATCH=max_match, BLOCK_K=triton.next_power_of_2(k), BLOCK=1024, num_warps=8,
            )  # fmt: skip
    return drafts, counts, lengths


@triton.jit
def _match(
    history, num_tokens, drafts, counts, lengths, stride, k, min_match,
    MAX_MATCH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: over tiles of end positions, how far each matches the newest tokens; keep the best."""
    row = tl.program_id(0)
    last = tl.load(num_tokens + row).to(tl.int32) - 1
    h = history + row.to(tl.int64) * stride
    best_length = 0
    best_end = 0
    for start in range(0, last, BLOCK):
        ends = start + tl.arange(0, BLOCK)
        alive = (ends < last).to(tl.int32)
        length = tl.zeros([BLOCK], tl.int32)
        i = 0
        going = 1
        while going > 0:
            newest = tl.load(h + tl.maximum(last - i, 0))
            seen = tl.load(h + ends - i, mask=(ends >= i) & (alive > 0), other=-1)
            alive = alive * ((seen == newest) & (ends >= i)).to(tl.int32)
            length += alive
            i += 1
            going = tl.max(alive, 0) * (i < MAX_MATCH).to(tl.int32)
        longest = tl.max(length, 0)
        latest = tl.max(tl.where((length == longest) & (ends < last), ends, 0), 0)
        best_end = tl.where(longest >= best_length, latest, best_end)
        best_length = tl.maximum(longest, best_length)
    found = best_length >= min_match
    j = tl.arange(0, BLOCK_K)
    period = tl.maximum(last - best_end, 1)
    token = tl.load(h + best_end + 1 + j % period, mask=j < tl.where(found, k, 0), other=0)
    tl.store(drafts + row.to(tl.int64) * k + j, token.to(tl.int64), mask=j < k)
    tl.store(counts + row, tl.where(found, k, 0).to(tl.int64))
    tl.store(lengths + row, tl.where(found, best_length, 0).to(tl.int64))
