"""The Triton side of `reference.philox`: the same words, Gumbel noise and fixed-point weights, bit for bit.

A kernel that needs these bits is compiled without fused multiply-add; divisions are rounded to nearest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.backend import INTERPRETED

FAST: tl.constexpr = tl.constexpr(not INTERPRETED)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
SQRT_HALF_BITS: tl.constexpr = tl.constexpr(0x3F3504F3)
UNIT: tl.constexpr = tl.constexpr(2.3283064365386963e-10)  # 2^-32
MIN_TEMPERATURE: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def _philox_round(c0, c1, c2, c3, k0, k1):
    """A 64-bit product is one instruction; its halves taken singly would be two, one of them slow."""
    product0 = c0.to(tl.uint64) * 0xD2511F53
    product1 = c2.to(tl.uint64) * 0xCD9E8D57
    c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
    c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
    return c0, product1.to(tl.uint32), c2, product0.to(tl.uint32)


@triton.jit
def noise_words(seed, position, quads):
    """The random words, uint32, of tokens 4q, 4q + 1, 4q + 2, 4q + 3 for each q of `quads`.

    Ten rounds of Philox4x32 (Salmon et al., SC 2011): counter (q, position, 0, 0), key the 64 bits of `seed`.
    """
    c0 = quads.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c1, c3 = c2 + position.to(tl.uint32), c2
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0, k1)
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _log_parts(exponent, fraction):
    """exponent ln 2 + ln(1 + fraction): the series of atanh."""
    s = tl.div_rn(fraction, fraction + 2.0)
    z = s * s
    series = (((z * (1 / 9) + 1 / 7) * z + 1 / 5) * z + 1 / 3) * z + 1.0
    return exponent * LN2 + (s + s) * series


@triton.jit
def exact_log(x):
    """The natural logarithm of normal positive fp32, with the bits of the twin's `log`."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return _log_parts(exponent.to(tl.float32), (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0)


@triton.jit
def gumbel_of_words(words):
    """words uint32 -> Gumbel noise fp32, with both tails at the resolution of the word."""
    u = (words.to(tl.float32) + 0.5) * UNIT
    q = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * UNIT
    small = u < 0.29289321881345254
    bits = q.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return -exact_log(-_log_parts(tl.where(small, 0, exponent).to(tl.float32), tl.where(small, -u, fraction)))


@triton.jit
def _fast_log2(x, NEGATED: tl.constexpr):
    """log2 of x or -x by the hardware, within 2^-22; tl.log2 takes 20 instructions. The interpreter has no assembler."""
    if FAST:
        if NEGATED:  # here, since Triton's own negation is a subtraction from zero
            code: tl.constexpr = "{ .reg .f32 x; neg.f32 x, $1; lg2.approx.ftz.f32 $0, x; }"
        else:
            code: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        x = tl.inline_asm_elementwise(code, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        x = tl.log2(-x if NEGATED else x)
    return x


@triton.jit
def log2_exponential(words):
    """log2 of E = -log2(1 - U), U = (r + 1/2) 2^-32, or less: Gumbel noise is -ln 2 (log2 E + log2 ln 2).

    E is taken for less than it is, by 2^-16 in 1 - U, which pays for rounding and keeps the logarithm off zero, or, where
    that leaves more, by U / ln 2. So noise of it is never too low, but for rounding in the sixth digit; it is at most
    3e-3 too high where it is above -1.5, and up to 0.7 at its lower end.
    """
    r = words.to(tl.float32)
    negative = tl.minimum(_fast_log2(r * -UNIT + (1 + 2.0**-16), False), r * (-UNIT * LOG2_E) - 0.5 * UNIT * LOG2_E)
    return _fast_log2(negative, True)


@triton.jit
def weight_of(distance):
    """exp(distance), distance <= 0, in int64 units of 2^-34: the twin's `weights`, operation by operation."""
    y = tl.maximum(distance * LOG2_E, -64.0)
    n = tl.floor(y + 0.5)
    t = (y - n) * LN2
    series = (((((t * (1 / 720) + 1 / 120) * t + 1 / 24) * t + 1 / 6) * t + 0.5) * t + 1.0) * t + 1.0
    scale = ((n.to(tl.int32) + 161) << 23).to(tl.float32, bitcast=True)
    return (series * scale).to(tl.int64)
