"""Drawing one token per row of logits, with noise that depends on seed, position and token alone."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.backend import on_device, use_triton
from specdec.kernels.check import FLOATS, INTS, check
from specdec.kernels.reference import sample as reference
from specdec.kernels.reference.philox import log, weights
from specdec.kernels.reference.sample import MIN_TEMPERATURE, Sampling
from specdec.kernels.sample_kernel import race_kernel, winner_kernel

TILE = 2048


def sample(
    logits: Tensor,
    positions: Tensor,
    sampling: Sampling,
    *,
    rows: Tensor | None = None,
    noise: bool = True,
    filters: bool = True,
    vocab_size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw argmax over v of logit(v) / temperature + g(seed, position, v), after top-k, top-p and min-p: [T] int64.

    logits [T, V] fp32, bf16 or fp16, last dimension contiguous; positions [T]: where the drawn token will stand;
    sampling: columns [R]; rows [T] maps each row of logits to its parameters (None: row t has parameters t).
    noise, filters: False promises that no row has a temperature above 0, or a filter. vocab_size: only the first so many
    columns can be drawn. Temperature 0 is argmax, ties to the lowest id. Top-k and top-p keep ties at their threshold.
    A row that holds NaN, or nothing above -inf, gives -1.

    g is Gumbel noise of Philox4x32-10 keyed by the seed, with counter (token // 4, position): a draw depends on the
    row alone, not on batch, drafter or device. The Gumbel-max trick is Gumbel's (1954). Raises ValueError for tensors
    that don't fit.
    """
    rows_of_logits = logits.shape[0] if logits.dim() == 2 else -1
    check("logits", logits, (None, None), FLOATS, unit_stride=True)
    check("positions", positions, (rows_of_logits,), INTS, logits.device)
    if rows is not None:
        check("rows", rows, (rows_of_logits,), INTS, logits.device)
    for name, column in zip(Sampling._fields, sampling, strict=True):
        check(name, column, (sampling.seed.shape[0],), (), logits.device)
    if vocab_size is not None and not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(f"vocab_size: expected 1 to {logits.shape[1]}, the columns of logits, got {vocab_size}")
    if not use_triton(logits):
        return reference.sample(
            logits, positions, sampling, rows=rows, noise=noise, filters=filters, vocab_size=vocab_size, out=out
        )
    return _race(logits[:, :vocab_size], positions, sampling, rows, (noise, noise and filters), out)


def _race(
    logits: Tensor,
    positions: Tensor,
    sampling: Sampling,
    rows: Tensor | None,
    work: tuple[bool, bool],
    out: Tensor | None,
) -> Tensor:
    count, vocab_size = logits.shape
    noise, filters = work
    out = torch.empty(count, dtype=torch.int64, device=logits.device) if out is None else out
    if not count:
        return out
    tiles = -(-vocab_size // TILE)
    best = torch.empty(count, tiles, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(count, tiles, dtype=torch.int32, device=logits.device)
    kept = survivors(logits, sampling, rows) if filters else None
    with on_device(logits):
        race_kernel[(count, tiles)](
            logits, kept, positions, rows, sampling.temperature, sampling.seed, best, best_id,
            logits.stride(0), kept.stride(0) if kept is not None else 0, vocab_size, sampling.seed.shape[0], tiles,
            NOISE=noise, BLOCK=TILE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        winner_kernel[(count,)](best, best_id, out, tiles, BLOCK=triton.next_power_of_2(tiles), num_warps=1)
    return out


def survivors(logits: Tensor, sampling: Sampling, rows: Tensor | None) -> Tensor:
    """[T, V] bool, what passes top-k, then top-p of what is left, then min-p; sorted, with nothing read back.

    Masses are fixed-point integers, so that their sums don't depend on an order.
    """
    if rows is not None:
        index = rows.long().clamp(0, sampling.seed.shape[0] - 1)
        sampling = Sampling(*(column[index] for column in sampling))
    x = logits.float()
    vocab_size = x.shape[1]
    ordered = x.sort(dim=1, descending=True).values
    k = torch.where(sampling.top_k > 0, sampling.top_k, vocab_size).long().clamp(max=vocab_size)
    threshold = ordered.gather(1, k[:, None] - 1)
    z = ordered * (1.0 / sampling.temperature.float().clamp(min=MIN_TEMPERATURE))[:, None]
    mass = torch.where(ordered >= threshold, weights(z - z[:, :1]), 0)
    above = (mass.cumsum(1) - mass).double()
    inside = (above < mass.sum(1, keepdim=True).double() * sampling.top_p[:, None]) & (ordered >= threshold)
    inside = inside | (sampling.top_p >= 1)[:, None] & (ordered >= threshold)
    last = inside.sum(1, keepdim=True).clamp(min=1) - 1
    bound = z[:, :1] + log(sampling.min_p.clamp(min=1e-30))[:, None].clamp(max=0.0)
    allowed = (z >= bound) | (sampling.min_p <= 0)[:, None]
    last = torch.minimum(last, (allowed.sum(1, keepdim=True) - 1).clamp(min=0))
    return x >= ordered.gather(1, last)
