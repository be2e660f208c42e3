"""The two products that begin a gated MLP, and their activation, in one kernel: what lies between is never stored."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from specdec.kernels.backend import INTERPRETED, on_device, use_triton
from specdec.kernels.check import FLOATS, check
from specdec.kernels.dependent import dependent
from specdec.kernels.linear import MOST_TOKENS, few_sums, one_sums, tile
from specdec.kernels.reference import linear as reference

LIBDEVICE = tl.constexpr(not INTERPRETED)
"""Whether the functions of libdevice are there, which the inductor uses: others differ in the last bit."""


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu", gate_first: bool = True
) -> Tensor:
    """activation(gate) * up of x [T, in] @ weight [2 I, in].T + bias [2 I], for T from 1 to 16: [T, I] in x's dtype.

    The first I columns of the product are the gate, the others up, or the other way round. Bit for bit `linear` and what
    torch's inductor makes of the rest on a GPU: gate and up are rounded, and the activation, "silu", "gelu" or "gelu_tanh",
    times up is computed in fp32 and rounded once. The last dimension of every tensor must be contiguous. Raises ValueError
    for tensors that don't fit.
    """
    check("x", x, (None, None), FLOATS, unit_stride=True)
    tokens, width = x.shape
    if tokens > MOST_TOKENS:
        raise ValueError(f"x: expected at most {MOST_TOKENS} tokens, got {tokens}")
    check("weight", weight, (None, width), (x.dtype,), x.device, unit_stride=True)
    if len(weight) % 2:
        raise ValueError(f"weight: expected an even number of rows, got {len(weight)}")
    if bias is not None:
        check("bias", bias, (len(weight),), (x.dtype,), x.device, unit_stride=True)
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(reference.ACTIVATIONS)}, got {activation}")
    if not use_triton(x) or width == 1:  # as in `linear`
        return reference.gated_linear(x, weight, bias, activation, gate_first)
    out = x.new_empty(tokens, len(weight) // 2)
    if out.numel():
        with on_device(x):
            (_one if tokens == 1 else _few)(x, weight, bias, activation, gate_first, out)
    return out


def _one(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gate_first: bool, out: Tensor) -> None:
    inner, width = out.shape[1], x.shape[1]
    block = min(triton.next_power_of_2(width), 1024)
    one_gated_kernel[(triton.cdiv(inner, 2),)](
        x, weight, bias, out, inner, width, weight.stride(0),
        ACTIVATION=activation, GATE_FIRST=gate_first, ROWS=4, BLOCK=block, EVEN=width % block == 0,
        num_warps=4, **dependent(x),
    )  # fmt: skip


def _few(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gate_first: bool, out: Tensor) -> None:
    inner, width = out.shape[1], x.shape[1]
    block_rows, block, stages, warps = _tile(2 * inner, width, x.element_size())
    few_gated_kernel[(triton.cdiv(inner, block_rows // 2),)](
        x, weight, bias, out, len(x), inner, width, x.stride(0), weight.stride(0),
        ACTIVATION=activation, GATE_FIRST=gate_first, TOKENS=8 if len(x) <= 8 else 16, ROWS=block_rows, BLOCK=block,
        EVEN=width % block == 0, STAGES=stages, num_warps=warps, **dependent(x),
    )  # fmt: skip


def _tile(rows: int, width: int, element_size: int) -> tuple[int, int, int, int]:
    """`linear.tile`, but where layers are wide the best of those measured for this kernel (docs/results.md)."""
    if rows < 8192 or element_size == 4:
        return tile(rows, width, element_size)
    return (128, 64, 4, 4) if width >= 4096 else (64, 128, 3, 4)


@triton.jit
def one_gated_kernel(
    x, weight, bias, out, inner, width, stride_w,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for ROWS / 2 outputs of a single token: `linear.one_kernel` with the rows of both halves in its tile."""
    n = _rows(inner, ROWS)
    y = one_sums(x, weight, n, width, stride_w, BLOCK, EVEN, DEPENDENT)
    if bias is not None:
        y += tl.load(bias + n).to(tl.float32)
    y = _gated(y.to(out.dtype.element_ty)[:, None], ACTIVATION, GATE_FIRST)
    i = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)[:, None]
    tl.store(out + i, y, mask=i < inner)


@triton.jit
def few_gated_kernel(
    x, weight, bias, out, tokens, inner, width, stride_x, stride_w,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for ROWS / 2 outputs of every token: `linear.few_kernel` with the rows of both halves in its tile."""
    n = _rows(inner, ROWS)[:, None]
    t = tl.arange(0, TOKENS)[None, :]
    sums = few_sums(x, weight, n, t, tokens, width, stride_x, stride_w, BLOCK, EVEN, STAGES, DEPENDENT)
    if bias is not None:
        sums += tl.load(bias + n).to(tl.float32)
    y = _gated(sums.to(out.dtype.element_ty), ACTIVATION, GATE_FIRST)
    i = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)[:, None]
    tl.store(out + t * inner + i, y, mask=(t < tokens) & (i < inner))


@triton.jit
def _rows(inner, ROWS: tl.constexpr):
    """The rows of the weight that a program sums [ROWS]: ROWS / 2 of the first half, then those that meet them."""
    r = tl.arange(0, ROWS)
    i = tl.program_id(0) * (ROWS // 2) + r % (ROWS // 2)
    return tl.minimum(i, inner - 1) + r // (ROWS // 2) * inner


@triton.jit
def _gated(y, ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Rounded sums [ROWS, TOKENS] of such rows into outputs [ROWS / 2, TOKENS] in fp32."""
    halves = tl.permute(tl.reshape(y, (2, y.shape[0] // 2, y.shape[1])), (1, 2, 0))
    first, second = tl.split(halves.to(tl.float32))
    if GATE_FIRST:
        return _activated(first, ACTIVATION) * second
    else:
        return _activated(second, ACTIVATION) * first


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Operation by operation what the inductor makes of torch's silu and gelu."""
    if ACTIVATION == "silu":
        return x / (_exp(-x) + 1.0)
    elif ACTIVATION == "gelu":
        return x * 0.5 * (_erf(x * 0.7071067811865476) + 1.0)
    else:
        inner = (x + x * x * x * 0.044715) * 0.7978845608028654
        return x * 0.5 * (_tanh(inner) + 1.0)


@triton.jit
def _exp(x):
    return libdevice.exp(x) if LIBDEVICE else tl.exp(x)


@triton.jit
def _erf(x):
    return libdevice.erf(x) if LIBDEVICE else tl.erf(x)


@triton.jit
def _tanh(x):
    return libdevice.tanh(x) if LIBDEVICE else 2.0 / (tl.exp(-2.0 * x) + 1.0) - 1.0
