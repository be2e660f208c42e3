"""Keeping what the target drew too: the accepted prefix of each row's drafts, cut at its end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.backend import on_device, use_triton
from specdec.kernels.check import INTS, check
from specdec.kernels.reference import accept as reference


def accept(
    tokens: Tensor, drafts: Tensor, num_drafts: Tensor, cu_seqlens_q: Tensor, stop_ids: Tensor, running: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compare each row's drafts with the tokens that the target drew at the same positions.

    tokens [N] int64: drawn at the packed query tokens, -1 where none could be drawn; row r's are those from
    cu_seqlens_q[r] on, num_drafts[r] + 1 of them. drafts [R, k] int64; num_drafts [R] int64; cu_seqlens_q [R + 1] int32;
    stop_ids [R, E] int64, -1 unused; running [R] bool, other rows emit nothing.

    Returns out [R, k + 1] int64, the emitted tokens padded with -1: the drafts that match, then the token drawn after
    them (bonus or correction), up to and with the first stop id, and short of a token that could not be drawn;
    num_emitted [R]; num_accepted [R], before the cut; ended [R] bool, at a stop id; failed [R] bool, nothing to draw.
    Raises ValueError for tensors that don't fit.
    """
    rows, k = drafts.shape
    check("tokens", tokens, (None,), (torch.int64,), drafts.device)
    check("num_drafts", num_drafts, (rows,), INTS, drafts.device)
    check("cu_seqlens_q", cu_seqlens_q, (rows + 1,), INTS, drafts.device)
    check("stop_ids", stop_ids, (rows, None), INTS, drafts.device)
    check("running", running, (rows,), (torch.bool,), drafts.device)
    if not use_triton(drafts):
        return reference.accept(tokens, drafts, num_drafts, cu_seqlens_q, stop_ids, running)
    out = torch.empty(rows, k + 1, dtype=torch.int64, device=drafts.device)
    counts = torch.empty(2, rows, dtype=torch.int64, device=drafts.device)
    flags = torch.empty(2, rows, dtype=torch.bool, device=drafts.device)
    if rows:
        with on_device(drafts):
            _accept[(rows,)](
                tokens, drafts, num_drafts, cu_seqlens_q, stop_ids, running, out, counts, flags,
                tokens.shape[0], k, rows, stop_ids.shape[1], drafts.stride(0), drafts.stride(1), *stop_ids.stride(),
                BLOCK=triton.next_power_of_2(k + 1), BLOCK_E=triton.next_power_of_2(max(stop_ids.shape[1], 1)),
                num_warps=1,
            )  # fmt: skip
    return out, counts[0], counts[1], flags[0], flags[1]


@triton.jit(do_not_specialize=["num_tokens", "rows"])
def _accept(
    tokens, drafts, num_drafts, cu_seqlens_q, stop_ids, running, out, counts, flags,
    num_tokens, k, rows, num_stops, sd_r, sd_k, ss_r, ss_e,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    runs = tl.load(running + row) != 0
    first = tl.load(cu_seqlens_q + row)
    n = tl.load(num_drafts + row).to(tl.int32)
    drawn = tl.load(tokens + first + j, mask=(j <= tl.where(runs, n, -1)) & (first + j < num_tokens), other=-1)
    draft = tl.load(drafts + row * sd_r + j * sd_k, mask=j < k, other=-2)
    accepted = tl.min(tl.where((draft == drawn) & (j < n), BLOCK, j), 0)
    accepted = tl.where(runs, tl.minimum(accepted, n), 0)
    emitted = tl.where(runs, accepted + 1, 0)
    e = tl.arange(0, BLOCK_E)
    stop = tl.load(stop_ids + row * ss_r + e * ss_e, mask=e < num_stops, other=-1)
    is_stop = tl.sum(((drawn[:, None] == stop[None, :]) & (stop[None, :] >= 0)).to(tl.int32), 1) > 0
    first_stop = tl.min(tl.where(is_stop & (j < emitted), j, BLOCK), 0)
    first_nothing = tl.min(tl.where((drawn < 0) & (j < emitted), j, BLOCK), 0)
    emitted = tl.minimum(tl.minimum(emitted, first_nothing), first_stop + 1)
    ended = first_stop < emitted
    tl.store(out + row * (k + 1) + j, tl.where(j < emitted, drawn, -1), mask=j <= k)
    tl.store(counts + row, emitted.to(tl.int64))
    tl.store(counts + rows + row, accepted.to(tl.int64))
    tl.store(flags + row, ended)
    tl.store(flags + rows + row, (first_nothing < BLOCK) & (ended == 0))
