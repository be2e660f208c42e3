"""The Triton side of `sample`: tiles of a row race with estimated scores, then exact arithmetic names the row's winner.

An exact score costs a hundred instructions, an estimate ten, and only the tile with the best estimate needs more (now
and then a second one). The exact part is compiled without fused multiply-add and divides with rounding to nearest, so
that a token wins by the same fp32 score as in the torch twin (see `reference.philox`).
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
SQRT_HALF_BITS: tl.constexpr = tl.constexpr(0x3F3504F3)
UNIT: tl.constexpr = tl.constexpr(2.3283064365386963e-10)  # 2^-32
MIN_TEMPERATURE: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def log_parts(exponent, fraction):
    """exponent ln 2 + ln(1 + fraction): the series of atanh."""
    s = tl.div_rn(fraction, fraction + 2.0)
    z = s * s
    series = (((z * (1 / 9) + 1 / 7) * z + 1 / 5) * z + 1 / 3) * z + 1.0
    return exponent * LN2 + (s + s) * series


@triton.jit
def exact_log(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return log_parts(exponent.to(tl.float32), (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0)


@triton.jit
def gumbel_of_words(words):
    """words uint32 -> Gumbel noise fp32, with both tails at the resolution of the word."""
    u = (words.to(tl.float32) + 0.5) * UNIT
    q = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * UNIT
    small = u < 0.29289321881345254
    bits = q.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return -exact_log(-log_parts(tl.where(small, 0, exponent).to(tl.float32), tl.where(small, -u, fraction)))


@triton.jit
def noise_words(seed, position, first, QUADS: tl.constexpr):
    """Random words uint32 [QUADS, 4] of the tokens from `first` (a multiple of 4) on: counter (token // 4, position)."""
    quads = (first // 4 + tl.arange(0, QUADS)).to(tl.uint32)
    zero = tl.zeros([QUADS], tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, quads, zero + position.to(tl.uint32), zero, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [QUADS, 4])


@triton.jit
def estimate(x, scale, words):
    """(x / temperature + g) / ln 2 within 2e-3 and the rounding of x, or above it: never much below.

    U bounds E = -log1p(-U) from below where 1 - U has lost U; the 6e-7 pays for the rounding of 1 - U and of log2. The
    cap on E, past which 1 - U is too coarse, concerns one token in 3,000, none likely to win.
    """
    u = words.to(tl.float32) * UNIT + 0.5 * UNIT
    e = tl.minimum(tl.maximum(tl.log2(1.0 - u) * -LN2 - 6e-7, u), 8.0)
    return x * scale - tl.log2(e)


@triton.jit
def load_tile(logits, t, tile, stride, vocab_size, QUADS: tl.constexpr):
    """Token ids and logits fp32 of a tile, [QUADS, 4]; -inf past the vocabulary."""
    ids = tile * (4 * QUADS) + tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return ids, tl.load(logits + t * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def row_of(rows, t, num_rows):
    """The row of parameters of a row of logits; the nearest one for what is out of range (padding)."""
    return t if rows is None else tl.minimum(tl.maximum(tl.load(rows + t), 0), num_rows - 1)


@triton.jit
def race_kernel(
    logits, bounds, positions, rows, temperature, seed, best,
    stride, vocab_size, num_rows, tiles,
    NOISE: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """One program per (row of logits, tile): its best estimate, in bits; NaN if it holds NaN. bounds [T]: least logit."""
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = row_of(rows, t, num_rows)
    ids, x = load_tile(logits, t, tile, stride, vocab_size, QUADS)
    bad = tl.max((x != x).to(tl.int32))
    if bounds is not None:
        x = tl.where(x >= tl.load(bounds + t), x, float("-inf"))
    top = tl.max(x)
    result = top * LOG2_E
    if NOISE:
        temp = tl.load(temperature + row)
        if (temp > 0) & (top > float("-inf")):
            words = noise_words(tl.load(seed + row), tl.load(positions + t), tile * (4 * QUADS), QUADS)
            result = tl.max(estimate(x, LOG2_E / tl.maximum(temp, MIN_TEMPERATURE), words))
    tl.store(best + t * tiles + tile, tl.where(bad > 0, float("nan"), result))


@triton.jit
def winner_kernel(
    logits, bounds, positions, rows, temperature, seed, best, out,
    stride, vocab_size, num_rows, tiles,
    NOISE: tl.constexpr, QUADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: exact scores of the tiles that may hold the winner, best estimate first; -1 if none can win."""
    t = tl.program_id(0).to(tl.int64)
    row = row_of(rows, t, num_rows)
    i = tl.arange(0, BLOCK)
    estimates = tl.load(best + t * tiles + i, mask=i < tiles, other=float("-inf"))
    bad = tl.max((estimates != estimates).to(tl.int32), 0)
    top = tl.max(tl.where(estimates != estimates, float("-inf"), estimates), 0)
    best_score = float("-inf")
    winner = -1
    going = ((bad == 0) & (top > float("-inf"))).to(tl.int32)
    while going > 0:
        tile = tl.min(tl.where(estimates == top, i, BLOCK), 0)
        ids, score = load_tile(logits, t, tile, stride, vocab_size, QUADS)
        if bounds is not None:
            score = tl.where(score >= tl.load(bounds + t), score, float("-inf"))
        if NOISE:
            temp = tl.load(temperature + row)
            if temp > 0:
                z = score * tl.div_rn(1.0, tl.maximum(temp, MIN_TEMPERATURE))
                words = noise_words(tl.load(seed + row), tl.load(positions + t), tile * (4 * QUADS), QUADS)
                score = z + gumbel_of_words(words)
        tile_score = tl.max(score)
        tile_winner = tl.min(tl.where((score == tile_score) & (ids < vocab_size), ids, 2147483647))
        better = (tile_score > best_score) | ((tile_score == best_score) & (tile_winner < winner))
        winner = tl.where(better, tile_winner, winner)
        best_score = tl.maximum(best_score, tile_score)
        estimates = tl.where(i == tile, float("-inf"), estimates)
        top = tl.max(estimates, 0)
        slack = 3e-3 + 1e-5 * tl.abs(top)
        going = ((top > float("-inf")) & (top * LN2 + slack >= best_score)).to(tl.int32)
    tl.store(out + t, winner.to(tl.int64))
