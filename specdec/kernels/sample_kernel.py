"""The Triton side of `sample`: tiles of a row race for the best score, and a second kernel picks each row's winner.

Compiled without fused multiply-add and with divisions rounded to nearest, so that a token wins by the same fp32 score
as in the torch twin (see `reference.philox`).
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
SQRT_HALF_BITS: tl.constexpr = tl.constexpr(0x3F3504F3)


@triton.jit
def log_parts(exponent, fraction):
    """exponent ln 2 + ln(1 + fraction): the series of atanh."""
    s = tl.div_rn(fraction, fraction + 2.0)
    z = s * s
    series = (((z * (1 / 9) + 1 / 7) * z + 1 / 5) * z + 1 / 3) * z + 1.0
    return exponent * LN2 + (s + s) * series


@triton.jit
def gumbel_of_words(words):
    """words uint32 -> Gumbel noise fp32, with both tails at the resolution of the word."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    q = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    small = u < 0.29289321881345254
    bits = q.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = -log_parts(tl.where(small, 0, exponent).to(tl.float32), tl.where(small, -u, fraction))
    bits = e.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return -log_parts(exponent.to(tl.float32), fraction)


@triton.jit
def noise(seed, position, first, QUADS: tl.constexpr):
    """Gumbel noise of the 4 * QUADS tokens from `first` (a multiple of 4) on; Philox counter (token // 4, position)."""
    quads = (first // 4 + tl.arange(0, QUADS)).to(tl.uint32)
    zero = tl.zeros([QUADS], tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, quads, zero + position.to(tl.uint32), zero, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * QUADS])
    return gumbel_of_words(words)


@triton.jit
def race_kernel(
    logits, kept, positions, rows, temperature, seed, best, best_id,
    stride, kept_stride, vocab_size, num_rows, tiles,
    NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (row of logits, tile): the tile's best score and its lowest id; NaN if the tile holds NaN."""
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = t if rows is None else tl.minimum(tl.maximum(tl.load(rows + t), 0), num_rows - 1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + t * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    bad = tl.max((x != x).to(tl.int32), 0)
    score = x
    if NOISE:
        temp = tl.load(temperature + row)
        if temp > 0:
            score = x * tl.div_rn(1.0, tl.maximum(temp, 1e-6))
            if kept is not None:
                keep = tl.load(kept + t * kept_stride + ids, mask=ids < vocab_size, other=0)
                score = tl.where(keep != 0, score, float("-inf"))
            drawn = score + noise(tl.load(seed + row), tl.load(positions + t), tile * BLOCK, BLOCK // 4)
            # +inf wins without noise, and the noise of what is -inf or past the vocabulary is no score.
            score = tl.where((score == float("-inf")) | (score == float("inf")), score, drawn)
    top = tl.max(score, 0)
    winner = tl.min(tl.where(score == top, ids, 2147483647), 0)
    tl.store(best + t * tiles + tile, tl.where(bad > 0, float("nan"), top))
    tl.store(best_id + t * tiles + tile, winner)


@triton.jit
def winner_kernel(best, best_id, out, tiles, BLOCK: tl.constexpr):
    """One program per row: the best of its tiles, the lowest id of equals; -1 for NaN or nothing above -inf."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    score = tl.load(best + t * tiles + i, mask=i < tiles, other=float("-inf"))
    ids = tl.load(best_id + t * tiles + i, mask=i < tiles, other=2147483647)
    bad = tl.max((score != score).to(tl.int32), 0)
    top = tl.max(score, 0)
    winner = tl.min(tl.where(score == top, ids, 2147483647), 0)
    tl.store(out + t, tl.where((bad > 0) | (top == float("-inf")), -1, winner).to(tl.int64))
