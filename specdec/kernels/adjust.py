"""Changing logits before they are drawn from: penalties, biases and bans, at every token of a round at once.

What a token is adjusted by depends on the tokens before it, so drafts of the same round count for those behind them.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.adjust_kernel import adjust_kernel, ban_kernel, tally_kernel
from specdec.kernels.backend import on_device, use_triton
from specdec.kernels.check import FLOATS, INTS, check
from specdec.kernels.columns import Adjustments, Known
from specdec.kernels.reference import adjust as reference


def adjust(
    logits: Tensor,
    positions: Tensor,
    adjustments: Adjustments,
    known: Known,
    drafts: Tensor,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """The logits as their rows want them, [T, min(V, W)] fp32: penalties, then bias, then bans.

    logits [T, W] fp32, bf16 or fp16; positions [T]: where the token drawn from them will stand. known: the B
    rows of the round; drafts [B, K] int64: row b's tokens from position num_tokens[b] on, of which those before the
    token's own position count. rows [T]: which of the B rows a row of logits belongs to (None: row t is b = t).
    `adjustments` has V columns; row b's entries there are those of the engine's row index[b].

    With c the times that a token is in the row's output, drafts included, and x its logit: if it is in prompt or output
    x becomes x / repetition above 0 and x * repetition below (Keskar et al., 2019); then x -
    frequency * c, then x - presence if c > 0, then x + bias. A ban whose tokens but for the last one are the row's
    newest makes the last one -inf, at positions below its `until`. A row without flags keeps its logits.
    Raises ValueError for tensors that don't fit.
    """
    count, batch = (logits.shape[0] if logits.dim() == 2 else -1), len(known.index)
    check("logits", logits, (None, None), FLOATS, unit_stride=True)
    check("positions", positions, (count,), INTS, logits.device)
    check("drafts", drafts, (batch, None), (torch.int64,), logits.device)
    if rows is not None:
        check("rows", rows, (count,), INTS, logits.device)
    if not use_triton(logits):
        return reference.adjust(logits, positions, adjustments, known, drafts, rows=rows)
    a = adjustments
    columns, vocab_size = min(logits.shape[1], a.counts.shape[1]), a.counts.shape[1]
    out = torch.empty(count, columns, dtype=torch.float32, device=logits.device)
    if not count:
        return out
    where = (positions, rows, known.index, known.num_tokens, a.flags, drafts)
    sizes = (batch, *drafts.shape[1:], *drafts.stride())
    words, length = a.bans.shape[1:]
    with on_device(logits):
        adjust_kernel[(count, triton.cdiv(columns, 1024))](
            logits, out, *where, a.repetition, a.presence, a.frequency, a.counts, a.bias, logits.stride(0), columns,
            vocab_size, *sizes, BLOCK=1024, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        ban_kernel[(count,)](
            out, *where, known.all_tokens, a.bans, a.until, columns, known.all_tokens.stride(0), words, *sizes,
            LENGTH=length, BLOCK=triton.next_power_of_2(words), num_warps=4,
        )  # fmt: skip
    return out


def tally(adjustments: Adjustments, index: Tensor, token_ids: Tensor, num_emitted: Tensor) -> None:
    """Count what a round emitted, token_ids [B, k + 1] int64, the first num_emitted[b] of them for the row index[b]."""
    if not use_triton(token_ids):
        return reference.tally(adjustments, index, token_ids, num_emitted)
    batch, tokens = token_ids.shape
    a = adjustments
    with on_device(token_ids):
        tally_kernel[(batch,)](
            index, token_ids, num_emitted, a.flags, a.counts, tokens, token_ids.stride(0), a.counts.shape[1],
            BLOCK=triton.next_power_of_2(tokens), num_warps=1,
        )  # fmt: skip
