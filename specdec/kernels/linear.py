"""Linear layers of a few tokens on a GPU, where reading the weight is all of the cost."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.backend import on_device, use_triton
from specdec.kernels.check import FLOATS, check
from specdec.kernels.dependent import dependent, wait
from specdec.kernels.reference import linear as reference

MOST_TOKENS = 16
"""Tokens that one call takes. Libraries have good kernels for more."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias [out], for T from 1 to 16: [T, out] in x's dtype, summed in fp32.

    `residual` [T, out] is added to that, rounded as it is: bit for bit `linear(x, weight, bias) + residual`.
    The last dimension of every tensor must be contiguous. Raises ValueError for tensors that don't fit.
    """
    check("x", x, (None, None), FLOATS, unit_stride=True)
    tokens, width = x.shape
    if tokens > MOST_TOKENS:
        raise ValueError(f"x: expected at most {MOST_TOKENS} tokens, got {tokens}")
    check("weight", weight, (None, width), (x.dtype,), x.device, unit_stride=True)
    if bias is not None:
        check("bias", bias, (weight.shape[0],), (x.dtype,), x.device, unit_stride=True)
    if residual is not None:
        check("residual", residual, (tokens, weight.shape[0]), (x.dtype,), x.device, unit_stride=True)
    if not use_triton(x) or width == 1:  # one product and the residual would be fused, and rounded once
        return reference.linear(x, weight, bias, residual)
    out = x.new_empty(tokens, weight.shape[0])
    if out.numel():
        with on_device(x):
            _one(x, weight, bias, residual, out) if tokens == 1 else _few(x, weight, bias, residual, out)
    return out


def _one(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    rows, width = weight.shape
    block = min(triton.next_power_of_2(width), 1024)
    one_kernel[(triton.cdiv(rows, 4),)](
        x, weight, bias, residual, out, rows, width, weight.stride(0),
        ROWS=4, BLOCK=block, EVEN=width % block == 0, num_warps=4, **dependent(x),
    )  # fmt: skip


def _few(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    rows, width = weight.shape
    block_rows, block, stages, warps = tile(rows, width, x.element_size())
    few_kernel[(triton.cdiv(rows, block_rows),)](
        x, weight, bias, residual, out, len(x), rows, width,
        x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0),
        TOKENS=8 if len(x) <= 8 else 16, ROWS=block_rows, BLOCK=block, EVEN=width % block == 0, STAGES=stages,
        num_warps=warps, **dependent(x),
    )  # fmt: skip


def tile(rows: int, width: int, element_size: int) -> tuple[int, int, int, int]:
    """Rows and columns of a program's tile, stages and warps: the best of those measured on an H200 (docs/results.md).

    A tile of 16 rows by one warp makes as many programs as there are places for; wide layers have enough rows for more.
    """
    if rows >= 8192:
        block_rows, block, stages, warps = 64, 128, 4, 4
    elif width >= 8192:
        block_rows, block, stages, warps = 16, 512, 3, 2
    elif width >= 1024:
        block_rows, block, stages, warps = 16, 256, 4, 1
    else:
        block_rows, block, stages, warps = 16, 64, 8, 1
    if element_size == 4 and width >= 1024:
        warps = 4  # tiles live in registers, for want of tensor cores: fewer warps spilled up to 5 KB a thread on sm_80
    return block_rows, max(block * 2 // element_size, 16), stages, warps


@triton.jit
def one_kernel(
    x, weight, bias, residual, out, rows, width, stride_w,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs of a single token: too few products for tensor cores to be worth their layout."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = one_sums(x, weight, tl.minimum(n, rows - 1), width, stride_w, BLOCK, EVEN, DEPENDENT)
    if bias is not None:
        y += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
    if residual is not None:
        y = y.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(out + n, y, mask=n < rows)


@triton.jit
def few_kernel(
    x, weight, bias, residual, out, tokens, rows, width, stride_x, stride_w, stride_r,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs of every token, the weight as the left operand: its rows fill the tensor cores' tile."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    t = tl.arange(0, TOKENS)[None, :]
    sums = few_sums(
        x, weight, tl.minimum(n, rows - 1), t, tokens, width, stride_x, stride_w, BLOCK, EVEN, STAGES, DEPENDENT
    )
    if bias is not None:
        sums += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
    within = (t < tokens) & (n < rows)
    if residual is not None:
        sums = sums.to(out.dtype.element_ty).to(tl.float32)
        sums += tl.load(residual + t * stride_r + n, mask=within, other=0.0).to(tl.float32)
    tl.store(out + t * rows + n, sums, mask=within)


@triton.jit
def one_sums(x, weight, n, width, stride_w, BLOCK: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr):
    """Rows n [ROWS] of the weight times a single token, in fp32. The first tile is loaded before the wait."""
    k = tl.arange(0, BLOCK)[None, :]
    w_tile = weight + n.to(tl.int64)[:, None] * stride_w + k
    w = _load(w_tile, k < width, EVEN)
    wait(DEPENDENT)
    sums = w.to(tl.float32) * _load(x + k, k < width, EVEN).to(tl.float32)
    for start in range(BLOCK, width, BLOCK):
        within = k < width - start
        sums += _load(w_tile + start, within, EVEN).to(tl.float32) * _load(x + k + start, within, EVEN).to(tl.float32)
    return tl.sum(sums, 1)


@triton.jit
def few_sums(
    x, weight, n, t, tokens, width, stride_x, stride_w,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rows n [ROWS, 1] of the weight times tokens t [1, TOKENS], in fp32: [ROWS, TOKENS], on tensor cores."""
    across, down = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK)[:, None]
    w_tile = weight + n.to(tl.int64) * stride_w + across
    x_tile = x + t * stride_x + down
    w = _load(w_tile, across < width, EVEN)
    wait(DEPENDENT)
    a = tl.load(x_tile, mask=(t < tokens) & (EVEN | (down < width)), other=0.0)
    sums = tl.dot(w, a, tl.zeros((n.shape[0], t.shape[1]), tl.float32), input_precision="ieee")
    for start in tl.range(BLOCK, width, BLOCK, num_stages=STAGES):
        w = _load(w_tile + start, across < width - start, EVEN)
        a = tl.load(x_tile + start, mask=(t < tokens) & (EVEN | (down < width - start)), other=0.0)
        sums = tl.dot(w, a, sums, input_precision="ieee")
    return sums


@triton.jit
def _load(pointer, within, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=within, other=0.0)
