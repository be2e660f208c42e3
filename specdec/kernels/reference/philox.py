"""Counter-based Gumbel noise in plain torch: Philox4x32-10, and a logarithm and an exponential that round alike everywhere.

Every function here uses only integer operations and single IEEE additions, multiplications and divisions, so that the
Triton kernels (compiled without fused multiply-add) give the same bits on any device.
"""

import torch
from torch import Tensor

Word = Tensor | int

MASK32 = 0xFFFFFFFF
LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
SQRT_HALF_BITS = 0x3F3504F3
WEIGHT_BITS = 34


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Ten rounds of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Words are 32-bit values held in int64 tensors of one shape, or in Python ints: whatever does not vary over a tensor
    is computed once, by Python. Returns four words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        # In place, for speed. Odd words keep dirty high halves: they are only ever xor-ed, and masked after that.
        c0 = product1 >> 32
        c0 ^= c1
        c0 ^= k0
        c0 &= MASK32
        c2 = product0 >> 32
        c2 ^= c3
        c2 ^= k1
        c2 &= MASK32
        c1, c3 = product1, product0
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1 & MASK32, c2, c3 & MASK32


def noise_words(seed: Word, positions: Word, quads: Word) -> tuple[Word, Word, Word, Word]:
    """The random words of tokens 4q, 4q+1, 4q+2, 4q+3 for each q of `quads`: counter (quad, position, 0, 0), 64-bit key."""
    return philox4x32((quads, positions & MASK32, 0, 0), (seed & MASK32, (seed >> 32) & MASK32))


def log(x: Tensor) -> Tensor:
    """Natural logarithm of normal positive fp32 `x`, within about 2 ulp: x = m 2^e, ln m = 2 atanh((m - 1) / (m + 1))."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    return _log(exponent.to(torch.float32), mantissa - 1.0)


def _log(exponent: Tensor, fraction: Tensor) -> Tensor:
    """exponent * ln 2 + ln(1 + fraction) for fraction in [1/sqrt(2) - 1, sqrt(2) - 1), by the series of atanh."""
    s = fraction / (fraction + 2.0)
    z = s * s
    series = (((z * (1 / 9) + 1 / 7) * z + 1 / 5) * z + 1 / 3) * z + 1.0
    return exponent * LN2 + (s + s) * series


def gumbel_of_words(words: Tensor) -> Tensor:
    """Gumbel noise, fp32, of 32-bit words held in int64: U = (r + 1/2) 2^-32, E = -log1p(-U), g = -log E.

    Both tails keep the resolution of the word: 1 - U is taken from the complement of r, never by subtraction in fp32.
    The largest noise is 33 ln 2 = 22.9.
    """
    u = (words.to(torch.float32) + 0.5) * 2.0**-32
    q = ((MASK32 - words).to(torch.float32) + 0.5) * 2.0**-32
    small = u < 0.29289321881345254
    bits = q.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    fraction = (bits - (exponent << 23)).view(torch.float32) - 1.0
    exponent = torch.where(small, 0, exponent).to(torch.float32)
    return -log(-_log(exponent, torch.where(small, -u, fraction)))


def gumbel(seed: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The noise g(seed, position, token): the same for every drafter, batch and vocabulary tile.

    `seed` int64, `positions` and `token_ids` any integers, all broadcast together. Returns fp32 of that shape.
    """
    seed, positions, token_ids = torch.broadcast_tensors(seed.long(), positions.long(), token_ids.long())
    words = torch.stack(noise_words(seed, positions, token_ids >> 2), dim=-1)
    return gumbel_of_words(words.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1))


def weights(distance: Tensor) -> Tensor:
    """exp(distance) for fp32 distance <= 0 as fixed point, int64 units of 2^-34: sums of it do not depend on their order."""
    y = (distance * LOG2_E).clamp_(min=-64.0)
    n = (y + 0.5).floor_()
    t = y.sub_(n).mul_(LN2)
    series = t * (1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0):
        series.add_(coefficient).mul_(t)
    series.add_(1.0)
    scale = ((n.to(torch.int32) + (WEIGHT_BITS + 127)) << 23).view(torch.float32)
    return series.mul_(scale).to(torch.int64)
