"""The Triton side of `adjust`: one pass over the logits, then a few programs for what only single tokens are."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.columns import BANS, BIAS, PENALTIES
from specdec.kernels.filter_kernel import row_of

_PENALTIES: tl.constexpr = tl.constexpr(PENALTIES)
_BIAS: tl.constexpr = tl.constexpr(BIAS)
_BANS: tl.constexpr = tl.constexpr(BANS)


@triton.jit
def adjust_kernel(
    logits, out, positions, rows, index, num_tokens, flags, drafts,
    repetition, presence, frequency, counts, bias, stride, columns, vocab_size,
    batch, k, s_b, s_k, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (row of logits, BLOCK columns)."""
    t = tl.program_id(0).to(tl.int64)
    b = row_of(rows, t, batch)
    row = tl.load(index + b)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = v < columns
    x = tl.load(logits + t * stride + v, mask=here, other=0.0).to(tl.float32)
    kinds = tl.load(flags + row)
    if (kinds & _PENALTIES) != 0:
        seen = tl.load(counts + row * vocab_size + v, mask=here, other=0)
        before = tl.load(positions + t).to(tl.int64) - tl.load(num_tokens + b)
        for j in range(0, tl.minimum(before, k)):
            token = tl.load(drafts + b * s_b + j * s_k)
            seen += tl.where(v == token, 2, 0)
        penalty = tl.load(repetition + row)
        x = tl.where(seen > 0, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)), x)
        x -= tl.load(frequency + row) * (seen >> 1).to(tl.float32)
        x -= tl.where(seen > 1, tl.load(presence + row), 0.0)
    if (kinds & _BIAS) != 0:
        x += tl.load(bias + row * vocab_size + v, mask=here, other=0.0)
    tl.store(out + t * columns + v, x, mask=here)


@triton.jit
def ban_kernel(
    out, positions, rows, index, num_tokens, flags, drafts, all_tokens, bans, until, columns, s_tokens, words,
    batch, k, s_b, s_k, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row of logits: which of its row's bans the tokens before it complete but for the last one."""
    t = tl.program_id(0).to(tl.int64)
    b = row_of(rows, t, batch)
    row = tl.load(index + b)
    if (tl.load(flags + row) & _BANS) != 0:
        w = tl.arange(0, BLOCK)
        position, l = tl.load(positions + t).to(tl.int64), tl.load(num_tokens + b)
        holds = position < tl.load(until + row * words + w, mask=w < words, other=0)
        ban = bans + (row * words + w) * LENGTH
        for i in range(0, LENGTH - 1):
            at = position - (LENGTH - 1) + i
            wanted = tl.load(ban + i, mask=w < words, other=-1)
            drafted = (at >= l) & (at - l < k)
            known = (at >= 0) & (at < l)
            token = tl.load(all_tokens + row * s_tokens + tl.where(known, at, 0), mask=known, other=-2).to(tl.int64)
            draft = tl.load(drafts + b * s_b + tl.where(drafted, at - l, 0) * s_k, mask=drafted, other=-2)
            holds = holds & ((wanted < 0) | (wanted == tl.where(drafted, draft, token)))
        last = tl.load(ban + LENGTH - 1, mask=w < words, other=-1)
        holds = holds & (last >= 0) & (last < columns)
        tl.store(out + t * columns + last, float("-inf"), mask=holds)


@triton.jit
def tally_kernel(
    index, token_ids, num_emitted, flags, counts, tokens, s_b, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per row. A token may have been emitted twice, so its count grows by atomic additions."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(index + b)
    if (tl.load(flags + row) & _PENALTIES) != 0:
        j = tl.arange(0, BLOCK)
        emitted = (j < tokens) & (j < tl.load(num_emitted + b))
        token = tl.load(token_ids + b * s_b + j, mask=emitted, other=-1)
        inside = emitted & (token >= 0) & (token < vocab_size)
        tl.atomic_add(counts + row * vocab_size + token, 2, mask=inside)
