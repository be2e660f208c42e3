"""Drawing one token per row of logits, with noise that depends on seed, position and token alone."""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from specdec.kernels.backend import on_device, use_triton
from specdec.kernels.check import FLOATS, INTS, check
from specdec.kernels.dependent import dependent
from specdec.kernels.filter_kernel import GROUP, LIMITS, PEAKS, peak_kernel, select_kernel
from specdec.kernels.reference import sample as reference
from specdec.kernels.reference.sample import Sampling
from specdec.kernels.sample_kernel import race_kernel, winner_kernel

TILE = 2048
"""Columns of a row that one program races."""
PROGRAMS = 4096
"""About as many keep a large GPU busy; in a large batch one takes several tiles, since most may have nothing to do."""
CAPACITY = 2048
"""Logits of a row that the filters keep at hand; where more may pass, the whole row is raced."""
ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits that are zero in every value of a dtype, as fp32."""


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
        peaks, masses, limits = _filter(logits, positions, sampling, rows, out) if filters else (None,) * 3
        inputs = (positions, rows, sampling.temperature, sampling.seed, best)
        sizes = (logits.stride(0), vocab_size, sampling.seed.shape[0], tiles)
        span = min(max(count * tiles // PROGRAMS, 1), 8)
        race_kernel[(count, -(-tiles // span))](
            logits,
            peaks,
            limits,
            *inputs,
            *sizes,
            span,
            NOISE=noise,
            QUADS=TILE // 4,
            num_warps=4,
            **dependent(logits),
        )
        winner_kernel[(count,)](
            logits, peaks, masses, limits, *inputs, out, sampling.top_p, *sizes, NOISE=noise, QUADS=TILE // 4,
            BLOCK=triton.next_power_of_2(tiles), PARTS=triton.next_power_of_2(_parts(vocab_size)), SCAN=4096,
            num_warps=8, enable_fp_fusion=False, **dependent(logits),
        )  # fmt: skip
    return out


def _filter(
    logits: Tensor, positions: Tensor, sampling: Sampling, rows: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima and masses of 128 columns each [T, V / 128], and `select_kernel`'s limits, which writes some rows of `out`."""
    count, vocab_size = logits.shape
    groups, parts = -(-vocab_size // GROUP.value), _parts(vocab_size)
    empty = partial(torch.empty, device=logits.device)
    peaks, hits = empty(count, groups, dtype=torch.float32), empty(count, groups, dtype=torch.int32)
    near, near_ids = empty(count, CAPACITY, dtype=torch.float32), empty(count, CAPACITY, dtype=torch.int32)
    masses = empty(count, groups, dtype=torch.float32)
    limits = empty(count, LIMITS.value, dtype=torch.float64)
    sizes = (logits.stride(0), vocab_size, sampling.seed.shape[0], groups)
    peak_kernel[(count, parts)](
        logits, peaks, masses, rows, *sampling[:3], *sizes, num_warps=4, enable_fp_fusion=False, **dependent(logits)
    )
    select_kernel[(count,)](
        logits, peaks, masses, positions, rows, *sampling, hits, near, near_ids, limits, out, *sizes,
        SHIFT=ZERO_BITS[logits.dtype], BLOCK=256, WIDE=512, PARTS=triton.next_power_of_2(parts),
        CAPACITY=CAPACITY, num_warps=8, enable_fp_fusion=False, **dependent(logits),
    )  # fmt: skip
    return peaks, masses, limits


def _parts(vocab_size: int) -> int:
    """Programs of `peak_kernel` for a row."""
    return -(-vocab_size // (GROUP.value * PEAKS.value))
