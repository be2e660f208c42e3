"""Drawing one token per row of logits, with noise that depends on seed, position and token alone."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.backend import on_device, use_triton
from specdec.kernels.check import FLOATS, INTS, check
from specdec.kernels.filter_kernel import bound_kernel, bracket_kernel, gather_kernel, peak_kernel
from specdec.kernels.reference import sample as reference
from specdec.kernels.reference.sample import Sampling
from specdec.kernels.sample_kernel import race_kernel, winner_kernel

TILE = 2048
"""Columns of a row that one program takes."""
CAPACITY = 4096
"""Logits of a row that the filters' search keeps at hand; it reads the row again where more may pass."""


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
    with on_device(logits):
        bounds = _bounds(logits, sampling, rows) if filters else None
        inputs = (logits, bounds, positions, rows, sampling.temperature, sampling.seed, best)
        sizes = (logits.stride(0), vocab_size, sampling.seed.shape[0], tiles)
        race_kernel[(count, tiles)](*inputs, *sizes, NOISE=noise, QUADS=TILE // 4, num_warps=4)
        winner_kernel[(count,)](
            *inputs, out, *sizes, NOISE=noise, QUADS=TILE // 4, BLOCK=triton.next_power_of_2(tiles),
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _bounds(logits: Tensor, sampling: Sampling, rows: Tensor | None) -> Tensor:
    """[T] fp32: the least logit of each row that passes top-k, then top-p of what is left, then min-p."""
    count, vocab_size = logits.shape
    groups = -(-vocab_size // 128)
    floats = torch.empty(3, count, dtype=torch.float32, device=logits.device)
    tops, floors, bounds = floats.unbind()
    peaks = torch.empty(count, groups, dtype=torch.float32, device=logits.device)
    near = torch.empty(count, CAPACITY, dtype=logits.dtype, device=logits.device)
    counts = torch.empty(count, dtype=torch.int32, device=logits.device)
    masses = torch.empty(count, dtype=torch.int64, device=logits.device)
    shift = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[logits.dtype]  # low bits of fp32 that are zero
    stride, num_rows = logits.stride(0), sampling.seed.shape[0]
    limits = (rows, sampling.temperature, sampling.top_k, sampling.top_p)
    peak_kernel[(count, -(-groups // 16))](logits, peaks, stride, vocab_size, groups, BLOCK=16, num_warps=4)
    bracket_kernel[(count,)](
        peaks, *limits, tops, floors, counts, masses, vocab_size, num_rows, groups,
        SHIFT=shift, BLOCK=triton.next_power_of_2(groups), num_warps=4,
    )  # fmt: skip
    gather_kernel[(count, -(-vocab_size // TILE))](
        logits, peaks, *limits, tops, floors, near, counts, masses, stride, vocab_size, num_rows, groups,
        BLOCK=TILE, CAPACITY=CAPACITY, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    bound_kernel[(count,)](
        logits, *limits, sampling.min_p, tops, floors, near, counts, masses, bounds, stride, vocab_size, num_rows,
        SHIFT=shift, BLOCK=512, CAPACITY=CAPACITY, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return bounds
