"""Top-k, top-p and min-p without a sort: which logits of a row may be drawn, found by narrowing an interval.

The maxima of 128 columns each, `peaks`, tell where to look: the k-th highest logit is no lower than the k-th highest
peak, and the nucleus of the peaks ends no higher than that of the row. What lies above such a floor is gathered, and the
exact bound is found among it; then the few that passed race at once. Where they are not few, the race of the whole row
(`sample_kernel`) goes on from here. Counts and fixed-point masses are integers, so their order does not matter. Where top-p
needs the mass of a whole row, an estimate by the hardware's exp2 decides, and exact arithmetic only if that is too close.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.dependent import wait
from specdec.kernels.philox_kernel import LOG2_E, MIN_TEMPERATURE, exact_log, gumbel_of_words, noise_words, weight_of

GROUP: tl.constexpr = tl.constexpr(128)
AT_ONCE: tl.constexpr = tl.constexpr(1024)  # logits that `gather` looks at, a multiple of GROUP
WAYS: tl.constexpr = tl.constexpr(8)
LIMITS: tl.constexpr = tl.constexpr(5)  # columns that `select_kernel` writes for a row
PEAKS: tl.constexpr = tl.constexpr(32)  # groups of a program of `peak_kernel`
MASS_UNIT: tl.constexpr = tl.constexpr(2.0**34)  # the highest logit's mass, as integers count it
MASS_ERROR: tl.constexpr = tl.constexpr(
    2e-5
)  # of an estimated mass; rounding explains half of it. Rounding to integers
# adds at most 1 for each logit.
INFINITY: tl.constexpr = tl.constexpr(float("inf"))
LOWEST: tl.constexpr = tl.constexpr(-2139095041)  # step_of(-inf, 0)


@triton.jit
def row_of(rows, t, num_rows):
    """The row of parameters of a row of logits; the nearest one for what is out of range (padding)."""
    return t if rows is None else tl.minimum(tl.maximum(tl.load(rows + t), 0), num_rows - 1)


@triton.jit
def step_of(x, SHIFT: tl.constexpr):
    """Place of fp32 x in the order of all floats of the dtype that leaves SHIFT low bits of fp32 zero; int64."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 counts as 0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def float_at(step, SHIFT: tl.constexpr):
    """The float of that place, as fp32."""
    key = ((step << SHIFT) | tl.where(step < 0, (1 << SHIFT) - 1, 0)).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def next_above(x):
    """The least fp32 that is greater than x."""
    return float_at(step_of(x, 0) + 1, 0)


@triton.jit
def mass_from(source, start, stop, least, inverse, z_top, BLOCK: tl.constexpr):
    """Mass of the values source[start:stop] that are >= least; int64 in units of 2^-34 of the highest's."""
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(start, stop, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(source + i, mask=i < stop, other=-INFINITY).to(tl.float32)
        total += tl.where(x >= least, weight_of(x * inverse - z_top), 0)
    return tl.sum(total, 0)


@triton.jit
def estimated_weight(distance):
    """exp(distance) by the hardware, within 2^-22 for distances as `weight_of` takes them."""
    return tl.exp2(distance * LOG2_E)


@triton.jit
def estimated_masses_from(source, size, least, higher, inverse, z_top, BLOCK: tl.constexpr):
    """About what `mass_from` gives for `least` and for `higher`; fp64."""
    total, part = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, size, BLOCK, loop_unroll_factor=4):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(source + i, mask=i < size, other=-INFINITY).to(tl.float32)
        weight = estimated_weight(x * inverse - z_top)
        total += tl.where(x >= least, weight, 0.0)
        part += tl.where(x >= higher, weight, 0.0)
    return tl.sum(total, 0).to(tl.float64) * MASS_UNIT, tl.sum(part, 0).to(tl.float64) * MASS_UNIT


@triton.jit
def _cuts(low, high):
    """WAYS ascending places above low, up to high; they may repeat."""
    return low + tl.maximum((high - low) * (tl.arange(0, WAYS) + 1) // WAYS, 1)


@triton.jit
def _narrow(low, high, places, passed):
    """`passed` holds for the first few places: the interval from the last that passed to the first that did not."""
    low = tl.maximum(low, tl.max(tl.where(passed, places, low), 0))
    return low, tl.minimum(high, tl.min(tl.where(passed, high, places), 0))


@triton.jit
def _counts_from(source, size, floats, BLOCK: tl.constexpr):
    """How many of `size` values are >= each of `floats` [WAYS]."""
    total = tl.zeros([BLOCK, WAYS], tl.int32)
    for start in tl.range(0, size, BLOCK, loop_unroll_factor=4):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(source + i, mask=i < size, other=-INFINITY).to(tl.float32)
        total += (x[:, None] >= floats[None, :]).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _masses_from(source, size, floats, inverse, z_top, BLOCK: tl.constexpr):
    """Mass of the values that are >= each of `floats` [WAYS]."""
    total = tl.zeros([BLOCK, WAYS], tl.int64)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(source + i, mask=i < size, other=-INFINITY).to(tl.float32)
        weight = weight_of(x * inverse - z_top)
        total += tl.where(x[:, None] >= floats[None, :], weight[:, None], 0)
    return tl.sum(total, 0)


@triton.jit
def kth_highest(source, size, k, floor, top, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The k-th highest of `size` values, at least k of which are >= floor and none > top."""
    low = step_of(floor, SHIFT)
    high = step_of(top, SHIFT) + 1
    while high - low > 1:
        places = _cuts(low, high)
        low, high = _narrow(low, high, places, _counts_from(source, size, float_at(places, SHIFT), BLOCK) >= k)
    return float_at(low, SHIFT)


@triton.jit
def nucleus_floor(source, size, target, floor, top, inverse, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The least float from `floor` on with less than `target` mass of the `size` values above it; at most `top`."""
    z_top = top * inverse
    low = step_of(floor, SHIFT) - 1  # as if the mass above it were enough
    high = step_of(top, SHIFT)
    while high - low > 1:
        places = _cuts(low, high)
        above = _masses_from(source, size, float_at(places + 1, SHIFT), inverse, z_top, BLOCK)
        low, high = _narrow(low, high, places, above.to(tl.float64) >= target)
    return float_at(high, SHIFT)


@triton.jit(do_not_specialize=["num_rows"])
def peak_kernel(
    logits, peaks, masses, rows, temperature, top_k, top_p, stride, vocab_size, num_rows, groups,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (row of logits, PEAKS groups of 128 columns): each group's maximum, +inf if it holds NaN, and for
    rows with top-p and no top-k its mass, where the highest of the program's has 1.
    """
    wait(DEPENDENT)
    t = tl.program_id(0).to(tl.int64)
    row = row_of(rows, t, num_rows)
    temp, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    group = tl.program_id(1) * PEAKS + tl.arange(0, PEAKS)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + t * stride + ids, mask=ids < vocab_size, other=-INFINITY).to(tl.float32)
    peak = tl.max(tl.where(x != x, INFINITY, x), 1)
    tl.store(peaks + t * groups + group, peak, mask=group < groups)
    if (temp > 0) & (p < 1) & ((k <= 0) | (k >= vocab_size)):
        inverse = tl.div_rn(1.0, tl.maximum(temp, MIN_TEMPERATURE))
        top = tl.max(peak, 0)
        weight = estimated_weight(x * inverse - tl.where(top > -INFINITY, top, 0.0) * inverse)
        tl.store(masses + t * groups + group, tl.sum(weight, 1), mask=group < groups)


@triton.jit
def _peak_range(peaks, groups, BLOCK: tl.constexpr):
    """(lowest, highest) of a row's peaks."""
    low = tl.full([BLOCK], INFINITY, tl.float32)
    high = tl.full([BLOCK], -INFINITY, tl.float32)
    for start in range(0, groups, BLOCK):
        i = start + tl.arange(0, BLOCK)
        peak = tl.load(peaks + i, mask=i < groups, other=-INFINITY)
        high = tl.maximum(high, peak)
        low = tl.where(i < groups, tl.minimum(low, peak), low)
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def mass_of_groups(peaks, masses, groups, least, inverse, z_top, PARTS: tl.constexpr):
    """A row's mass of the groups whose peaks are >= least, of what `peak_kernel` left: no less than that of the logits
    that are; fp64.
    """
    part = tl.arange(0, PARTS)
    group = part[:, None] * PEAKS + tl.arange(0, PEAKS)[None, :]
    peak = tl.load(peaks + group, mask=group < groups, other=-INFINITY)
    mass = tl.load(masses + group, mask=(group < groups) & (peak >= least), other=0.0)
    return tl.sum(tl.sum(mass, 1) * estimated_weight(tl.max(peak, 1) * inverse - z_top), 0).to(tl.float64) * MASS_UNIT


@triton.jit
def _list_groups(peaks, hits, groups, floor, floor_z, inverse, BLOCK: tl.constexpr):
    """Writes to `hits` the groups whose peaks are >= floor, and >= floor_z once multiplied by `inverse`; their number."""
    number = tl.zeros([], tl.int32)
    for start in range(0, groups, BLOCK):
        i = start + tl.arange(0, BLOCK)
        peak = tl.load(peaks + i, mask=i < groups, other=-INFINITY)
        hit = ((peak >= floor) & (peak * inverse >= floor_z) & (i < groups)).to(tl.int32)
        tl.store(hits + number + tl.cumsum(hit, 0) - 1, i, mask=hit > 0)
        number += tl.sum(hit, 0)
    return number


@triton.jit
def gather(
    whole, peaks, hits, near, near_ids, floor, floor_z, inverse, vocab_size, groups,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Logits >= floor, and >= floor_z once multiplied, into `near`; their number, or one above CAPACITY if too many."""
    number = _list_groups(peaks, hits, groups, floor, floor_z, inverse, BLOCK)
    tl.debug_barrier()  # what one thread wrote another reads
    count = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (start < number * GROUP) & (count <= CAPACITY):
        i = start + tl.arange(0, AT_ONCE)
        group = tl.load(hits + i // GROUP, mask=i < number * GROUP, other=groups)
        ids = group * GROUP + i % GROUP
        x = tl.load(whole + ids, mask=ids < vocab_size, other=-INFINITY).to(tl.float32)
        keep = (x >= floor) & (x * inverse >= floor_z) & (ids < vocab_size)
        place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
        count += tl.sum(keep.to(tl.int32), 0)
        keep &= place < CAPACITY
        tl.store(near + place, x, mask=keep)
        tl.store(near_ids + place, ids, mask=keep)
        start += AT_ONCE
    tl.debug_barrier()
    return count


@triton.jit
def race_near(near, near_ids, count, least, least_z, inverse, seed, position, BLOCK: tl.constexpr):
    """The token of the best exact score among the gathered logits that are >= least, and >= least_z once multiplied."""
    best = tl.full([], -INFINITY, tl.float32)
    winner = tl.full([], 2147483647, tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(near + i, mask=i < count, other=-INFINITY)
        ids = tl.load(near_ids + i, mask=i < count, other=2147483647)
        w0, w1, w2, w3 = noise_words(seed, position, ids >> 2)
        odd = (ids & 1) > 0
        words = tl.where((ids & 2) > 0, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
        z = x * inverse
        score = tl.where((x >= least) & (z >= least_z), z + gumbel_of_words(words), -INFINITY)
        top = tl.max(score, 0)
        token = tl.min(tl.where(score == top, ids, 2147483647), 0)
        winner = tl.where(top > best, token, tl.where(top == best, tl.minimum(winner, token), winner))
        best = tl.maximum(best, top)
    return winner


@triton.jit(do_not_specialize=["num_rows"])
def select_kernel(
    logits, peaks, masses, positions, rows, temperature, top_k, top_p, min_p, seed, hits, near, near_ids, limits, out,
    stride, vocab_size, num_rows, groups,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per row: its token, if no more than CAPACITY logits may be drawn; else, in `limits`, which may.

    limits [T, LIMITS] fp64: the least logit, the least logit / temperature, the highest logit, the mass that a token
    that top-p keeps has less than above it (+inf: no top-p), and how far off that may be. +inf as the least logit: the
    token is in `out`.
    """
    wait(DEPENDENT)
    t = tl.program_id(0).to(tl.int64)
    row = row_of(rows, t, num_rows)
    row_peaks = peaks + t * groups
    lowest, top = _peak_range(row_peaks, groups, BLOCK)
    temp, k, p, m = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    by_k, by_p = (k > 0) & (k < vocab_size), p < 1
    least = tl.full([], -INFINITY, tl.float32)
    least_z = tl.full([], -INFINITY, tl.float32)
    target, slack = tl.full([], INFINITY, tl.float64), tl.full([], 0.0, tl.float64)
    if (temp > 0) & (tl.abs(top) < INFINITY) & (by_k | by_p | (m > 0)):  # a row with NaN has +inf for its top
        inverse = tl.div_rn(1.0, tl.maximum(temp, MIN_TEMPERATURE))
        z_top = top * inverse
        whole = logits + t * stride
        row_near, row_ids = near + t * CAPACITY, near_ids + t * CAPACITY
        if m > 0:
            least_z = z_top + tl.minimum(exact_log(m), 0.0)
        floor_z = tl.where(by_k | by_p, -INFINITY, least_z)  # top-p's mass is that before min-p
        if by_k:
            if k <= groups:
                least = kth_highest(row_peaks, groups, k, lowest, top, SHIFT, BLOCK)
        elif by_p:
            mass = mass_of_groups(row_peaks, masses + t * groups, groups, -INFINITY, inverse, z_top, PARTS)
            target = mass * p.to(tl.float64)
            slack = target * MASS_ERROR + vocab_size
            if mass_from(row_peaks, 0, groups, lowest, inverse, z_top, BLOCK).to(tl.float64) >= target + slack:
                least = nucleus_floor(row_peaks, groups, target + slack, lowest, top, inverse, SHIFT, BLOCK)
        count = tl.zeros([], tl.int32) + vocab_size
        if (
            (count <= CAPACITY) | (least > -INFINITY) | (floor_z > -INFINITY)
        ):  # else there is nothing to tell them apart
            count = gather(
                whole, row_peaks, hits + t * groups, row_near, row_ids, least, floor_z, inverse, vocab_size, groups,
                BLOCK, CAPACITY,
            )  # fmt: skip
        if count <= CAPACITY:
            if by_k:
                least = kth_highest(row_near, count, k, least, top, SHIFT, BLOCK)
            if by_p:
                if by_k:
                    total = mass_from(row_near, 0, count, least, inverse, z_top, BLOCK)
                    target = total.to(tl.float64) * p.to(tl.float64)
                floor = least
                going = True
                while going:  # a second time only if the estimate is too close
                    least = nucleus_floor(row_near, count, target + slack, floor, top, inverse, SHIFT, BLOCK)
                    above = mass_from(row_near, 0, count, next_above(least), inverse, z_top, BLOCK)
                    going = (slack > 0) & (above.to(tl.float64) >= target - slack)
                    if going:
                        mass = mass_from(whole, 0, vocab_size, -INFINITY, inverse, z_top, WIDE)
                        target, slack = mass.to(tl.float64) * p.to(tl.float64), slack * 0
            position = tl.load(positions + t).to(tl.int64)
            token = race_near(row_near, row_ids, count, least, least_z, inverse, tl.load(seed + row), position, BLOCK)
            tl.store(out + t, token.to(tl.int64))
            least = tl.full([], INFINITY, tl.float32)
        elif by_k:
            least = kth_highest(whole, vocab_size, k, least, top, SHIFT, WIDE)
            if by_p:
                total = mass_from(whole, 0, vocab_size, least, inverse, z_top, WIDE)
                target = total.to(tl.float64) * p.to(tl.float64)
    at = limits + t * LIMITS
    tl.store(at, least.to(tl.float64))
    tl.store(at + 1, least_z.to(tl.float64))
    tl.store(at + 2, top.to(tl.float64))
    tl.store(at + 3, target)
    tl.store(at + 4, slack)
