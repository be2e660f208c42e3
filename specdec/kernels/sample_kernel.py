"""The Triton side of `sample`: tiles of a row race with estimated scores, then exact arithmetic names the row's winner.

An exact score costs a hundred instructions, an estimate ten, and only the tile with the best estimate needs more (now
and then a second one). The winner's score is the twin's to the bit, so both draw the same token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.dependent import wait
from specdec.kernels.filter_kernel import (
    GROUP,
    LIMITS,
    MASS_ERROR,
    estimated_masses_from,
    mass_from,
    mass_of_groups,
    next_above,
    row_of,
)
from specdec.kernels.philox_kernel import (
    LN2,
    LOG2_E,
    MIN_TEMPERATURE,
    gumbel_of_words,
    log2_exponential,
    noise_words,
)

LN_LN2: tl.constexpr = tl.constexpr(-0.36651292058166435)


@triton.jit
def load_tile(logits, t, tile, stride, vocab_size, QUADS: tl.constexpr):
    """Token ids and logits fp32 of a tile, [QUADS, 4]; -inf past the vocabulary."""
    ids = tile * (4 * QUADS) + tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return ids, tl.load(logits + t * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def split4(x, QUADS: tl.constexpr):
    """The four columns of x [QUADS, 4]."""
    even, odd = tl.split(tl.reshape(x, [QUADS, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def best_estimate(x, temp, seed, position, tile, QUADS: tl.constexpr):
    """The best of x [QUADS, 4], divided by temp and with noise if that is above 0, as a scalar; NaN counts as +inf."""
    x0, x1, x2, x3 = split4(x, QUADS)
    if temp > 0:
        scale = LOG2_E / tl.maximum(temp, MIN_TEMPERATURE)
        w0, w1, w2, w3 = noise_words(seed, position, tile * QUADS + tl.arange(0, QUADS))
        x0 = x0 * scale - log2_exponential(w0)
        x1 = x1 * scale - log2_exponential(w1)
        x2 = x2 * scale - log2_exponential(w2)
        x3 = x3 * scale - log2_exponential(w3)
    top = max_nan(max_nan(x0, x1), max_nan(x2, x3))
    top = tl.max(tl.where(top != top, float("inf"), top), 0)
    return tl.where(temp > 0, top * LN2 - LN_LN2, top)


@triton.jit
def race_tile(logits, t, tile, stride, vocab_size, temp, seed, position, QUADS: tl.constexpr):
    """The best estimate of a tile."""
    _, x = load_tile(logits, t, tile, stride, vocab_size, QUADS)
    return best_estimate(x, temp, seed, position, tile, QUADS)


@triton.jit(do_not_specialize=["num_rows", "span"])
def race_kernel(
    logits, peaks, limits, positions, rows, temperature, seed, best,
    stride, vocab_size, num_rows, tiles, span,
    NOISE: tl.constexpr, QUADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (row of logits, `span` tiles): the best score of each tile, at most a trifle too high.

    limits [T, LIMITS]: what `select_kernel` left of the row; a tile whose peaks, maxima of 128 columns, lie below is not read.
    """
    wait(DEPENDENT)
    t = tl.program_id(0).to(tl.int64)
    temp, key, position = 0.0, tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if NOISE:
        row = row_of(rows, t, num_rows)
        temp, key, position = tl.load(temperature + row), tl.load(seed + row), tl.load(positions + t).to(tl.int64)
    least, least_z = float("-inf"), float("-inf")
    if limits is not None:
        least = tl.load(limits + t * LIMITS).to(tl.float32)
        least_z = tl.load(limits + t * LIMITS + 1).to(tl.float32)
    if least < float("inf"):  # else the token is drawn already
        inverse = tl.div_rn(1.0, tl.maximum(temp, MIN_TEMPERATURE))
        first = tl.program_id(1) * span
        for tile in range(first, tl.minimum(first + span, tiles)):
            if limits is None:
                result = race_tile(logits, t, tile, stride, vocab_size, temp, key, position, QUADS)
            elif (least == float("-inf")) & (least_z == float("-inf")):
                result = race_tile(logits, t, tile, stride, vocab_size, temp, key, position, QUADS)
            else:
                group = tile * (QUADS // 32) + tl.arange(0, QUADS // 32)
                groups = tl.cdiv(vocab_size, GROUP)
                peak = tl.max(tl.load(peaks + t * groups + group, mask=group < groups, other=float("-inf")), 0)
                result = tl.full([], float("-inf"), tl.float32)
                if (peak >= least) & (peak * inverse >= least_z):
                    _, x = load_tile(logits, t, tile, stride, vocab_size, QUADS)
                    x = tl.where((x < least) | (x * inverse < least_z), float("-inf"), x)
                    result = best_estimate(x, temp, key, position, tile, QUADS)
            tl.store(best + t * tiles + tile, result)


@triton.jit
def exact_best(logits, t, tile, stride, vocab_size, least, least_z, temp, seed, position, QUADS: tl.constexpr):
    """(score, token, logit, whether there is a NaN) of a tile's winner, the lowest token of equals."""
    ids, x = load_tile(logits, t, tile, stride, vocab_size, QUADS)
    score = x
    if temp > 0:
        z = x * tl.div_rn(1.0, tl.maximum(temp, MIN_TEMPERATURE))
        w0, w1, w2, w3 = noise_words(seed, position, tile * QUADS + tl.arange(0, QUADS))
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [QUADS, 4])
        score = tl.where((x >= least) & (z >= least_z), z + gumbel_of_words(words), float("-inf"))
    bad = tl.max((x != x).to(tl.int32))
    score = tl.where(score != score, float("-inf"), score)
    top = tl.max(score)
    token = tl.min(tl.where((score == top) & (ids < vocab_size), ids, 2147483647))
    return top, token, tl.max(tl.where(ids == token, x, float("-inf"))), bad


@triton.jit
def row_winner(
    logits, t, stride, vocab_size, estimates, least, least_z, temp, seed, position,
    QUADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(token, its logit) of the best exact score, looking into tiles best estimate first; token -1 for NaN or nothing."""
    i = tl.arange(0, BLOCK)
    score, token, logit = float("-inf"), tl.full([], -1, tl.int32), tl.full([], float("-inf"), tl.float32)
    top = tl.max(estimates, 0)
    going = top > float("-inf")
    while going:
        tile = tl.min(tl.where(estimates == top, i, BLOCK), 0)
        tile_score, tile_token, tile_logit, bad = exact_best(
            logits, t, tile, stride, vocab_size, least, least_z, temp, seed, position, QUADS
        )
        better = (tile_score > score) | ((tile_score == score) & (tile_token < token))
        score = tl.where(better, tile_score, score)
        logit = tl.where(better, tile_logit, logit)
        token = tl.where(bad > 0, -1, tl.where(better, tile_token, token))
        estimates = tl.where(i == tile, float("-inf"), estimates)
        top = tl.max(estimates, 0)
        near = (temp > 0) & (top + 1e-3 >= score - 1e-6 * tl.abs(score))  # estimates are never lower than that
        # Without noise it is exact, and a later tile has higher ids; +inf may stand for a NaN.
        going = (bad == 0) & (top > float("-inf")) & (near | (top > score) | (top == float("inf")))
    return token, logit


@triton.jit
def _mass(logits, t, stride, vocab_size, least, inverse, top, BLOCK: tl.constexpr):
    """Mass of a row's logits that are >= least; fp64, exact."""
    return mass_from(logits + t * stride, 0, vocab_size, least, inverse, top * inverse, BLOCK).to(tl.float64)


@triton.jit
def _most(mass, vocab_size):
    """The most that an estimated mass may be exactly."""
    return mass * (1 + MASS_ERROR) + vocab_size


@triton.jit(do_not_specialize=["num_rows"])
def winner_kernel(
    logits, peaks, masses, limits, positions, rows, temperature, seed, best, out, top_p,
    stride, vocab_size, num_rows, tiles,
    NOISE: tl.constexpr, QUADS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SCAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per row that `select_kernel` left undecided: the token drawn; -1 for NaN or nothing above -inf.

    Where top-p's bound was not searched for, a winner that has the mass `target` above it is refused. Top-p keeps what
    is above some logit, so it refuses everything up to the winner's, and the race goes on above that. That a winner
    passes is mostly plain from the masses of the groups that hold anything above it; else a pass over the row tells.
    """
    wait(DEPENDENT)
    t = tl.program_id(0).to(tl.int64)
    row = row_of(rows, t, num_rows)
    i = tl.arange(0, BLOCK)
    temp, least, least_z = 0.0, float("-inf"), float("-inf")
    key, position = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if NOISE:
        temp, key, position = tl.load(temperature + row), tl.load(seed + row), tl.load(positions + t).to(tl.int64)
    if limits is None:
        estimates = tl.load(best + t * tiles + i, mask=i < tiles, other=float("-inf"))
        token, _ = row_winner(
            logits, t, stride, vocab_size, estimates, least, least_z, temp, key, position, QUADS, BLOCK
        )
        tl.store(out + t, token.to(tl.int64))
    else:
        least = tl.load(limits + t * LIMITS).to(tl.float32)
        least_z = tl.load(limits + t * LIMITS + 1).to(tl.float32)
        top = tl.load(limits + t * LIMITS + 2).to(tl.float32)
        target, slack = tl.load(limits + t * LIMITS + 3), tl.load(limits + t * LIMITS + 4)
        inverse = tl.div_rn(1.0, tl.maximum(temp, MIN_TEMPERATURE))
        z_top, groups = top * inverse, tl.cdiv(vocab_size, GROUP)
        weighed = slack > 0  # `peak_kernel` weighed this row's groups
        passing = tl.full([], float("inf"), tl.float32)  # logits from here on are known to pass
        going = least < float("inf")
        while going:
            estimates = tl.load(best + t * tiles + i, mask=i < tiles, other=float("-inf"))
            token, logit = row_winner(
                logits, t, stride, vocab_size, estimates, least, least_z, temp, key, position, QUADS, BLOCK
            )
            tl.store(out + t, token.to(tl.int64))
            going = (target < float("inf")) & (logit < tl.minimum(passing, top))
            least = next_above(logit)
            if going & weighed:
                above = mass_of_groups(peaks + t * groups, masses + t * groups, groups, least, inverse, z_top, PARTS)
                going = _most(above, vocab_size) + slack >= target
            if going:
                higher = least + 2 * temp  # few of the next winners will be below
                above, rest = estimated_masses_from(
                    logits + t * stride, vocab_size, least, higher, inverse, z_top, SCAN
                )
                passing = tl.where(_most(rest, vocab_size) + slack < target, higher, passing)
                if tl.abs(above - target) <= above * MASS_ERROR + vocab_size + slack:  # too close
                    if slack > 0:
                        p = tl.load(top_p + row).to(tl.float64)
                        target = p * _mass(logits, t, stride, vocab_size, float("-inf"), inverse, top, SCAN)
                        slack = slack * 0
                    above = _mass(logits, t, stride, vocab_size, least, inverse, top, SCAN)
                going = above >= target
