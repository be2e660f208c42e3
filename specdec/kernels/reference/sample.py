"""Drawing one token per row of logits: the torch twin of the sampling kernel, and the path that runs on a CPU.

The token drawn at a position is argmax over v of logit(v) / temperature + g(seed, position, v), after the filters. It is
a function of the row alone: not of the batch, of the other rows, nor of the device (see `philox` for the arithmetic).
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.reference.philox import gumbel_of_words, log, noise_words, weights

CHUNK = 128
MIN_TEMPERATURE = 1e-6
UNCLAMPED = 2**32 - 2**20
SMALL = 2048
"""Vocabularies up to this race in one pass for all rows: one row at a time, the calls would cost more than the work."""


class Sampling(NamedTuple):
    """Sampling parameters per row, on the device of the logits."""

    temperature: Tensor  # [R] fp32; <= 0 is greedy, positive ones count as at least 1e-6
    top_k: Tensor  # [R] int32; 0 is off
    top_p: Tensor  # [R] fp32; 1 is off
    min_p: Tensor  # [R] fp32; 0 is off
    seed: Tensor  # [R] int64


class _Row(NamedTuple):
    """The parameters of one row as Python numbers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


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
    """Draws a token for each row of `logits` [T, V]; the arguments are those of `specdec.kernels.sample.sample`.

    Returns [T] int64; -1 where a row holds NaN or nothing above -inf.
    """
    x = logits[:, :vocab_size].to(torch.float32)
    peaks = _chunk_max(x)
    tokens, best = _greedy(x, peaks)
    if noise and x.shape[0]:
        _draw_rows(x, peaks, _parameters(positions, sampling, rows, filters), tokens)
    tokens = torch.where(best > -math.inf, tokens, -1)  # a NaN is not above -inf either
    return tokens if out is None else out.copy_(tokens)


def _chunk_max(x: Tensor) -> Tensor:
    """Maxima of each 128 columns, [T, ceil(V / 128)]: the cheap first level of every search below. NaN propagates."""
    rows, columns = x.shape
    whole = columns // CHUNK * CHUNK
    peaks = x[:, :whole].unflatten(1, (-1, CHUNK)).amax(-1)
    return peaks if whole == columns else torch.cat([peaks, x[:, whole:].amax(-1, keepdim=True)], dim=1)


def _greedy(x: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest index of each row's maximum and that maximum; torch's own argmax over a vocabulary is several times slower."""
    best, chunk = peaks.max(-1)
    columns = (chunk * CHUNK).unsqueeze(1) + _range(CHUNK, x.device)
    inside = x.gather(1, columns.clamp(max=x.shape[1] - 1))
    return columns.gather(1, inside.argmax(-1, keepdim=True)).squeeze(1), best


def _parameters(positions: Tensor, sampling: Sampling, rows: Tensor | None, filters: bool) -> list[_Row]:
    """The parameters of every row of logits; a row index outside the table (padding) takes the nearest row."""
    if rows is not None:
        index = rows.long().clamp(0, sampling.seed.shape[0] - 1)
        sampling = Sampling(*(column[index] for column in sampling))
    columns = [column.tolist() for column in (*sampling, positions)]
    return [_Row(t, k, p, m, s, at) if filters else _Row(t, 0, 1.0, 0.0, s, at)
            for t, k, p, m, s, at in zip(*columns, strict=False)]  # fmt: skip


def _draw_rows(x: Tensor, peaks: Tensor, parameters: list[_Row], tokens: Tensor) -> None:
    """Overwrites the greedy `tokens` of the rows with a temperature; rows without a finite maximum keep theirs."""
    tops = peaks.amax(-1).tolist()
    few: list[tuple[_Row, int, Tensor, Tensor]] = []
    small: list[tuple[_Row, int]] = []
    for r, (top, row) in enumerate(zip(tops, parameters, strict=False)):
        if not (row.temperature > 0 and math.isfinite(top)):
            continue
        if x.shape[1] <= SMALL and not _filters(row):
            small.append((row, r))
            continue
        z = x[r] * _inverse(row.temperature, x)
        kept = _survivors(x[r], z, peaks[r], row)
        if kept is not None and (z.numel() <= SMALL or kept.numel() * 8 <= z.numel()):
            few.append((row, r, kept, z[kept]))
            continue
        if kept is not None:
            z = torch.full_like(z, -math.inf).index_copy_(0, kept, z[kept])
        tokens[r] = _race(z, row.seed, row.position)
    _race_few(few, tokens)
    _race_small(x, small, tokens)


def _inverse(temperature: float, like: Tensor) -> Tensor:
    one = torch.ones((), dtype=torch.float32, device=like.device)
    return one / torch.full_like(one, temperature).clamp(min=MIN_TEMPERATURE)


@lru_cache(maxsize=8)
def _range(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _race(z: Tensor, seed: int, position: int) -> int:
    """argmax of z [V] + noise over a whole vocabulary."""
    words = noise_words(seed, position, _range(-(-z.numel() // 4), z.device))
    return _winner(z, torch.stack(words, dim=-1).view(-1)[: z.numel()])


def _race_few(few: list[tuple[_Row, int, Tensor, Tensor]], tokens: Tensor) -> None:
    """The same race among the few survivors of each (row, index, token ids, z), with one pass of Philox for all rows."""
    if not few:
        return
    sizes = [ids.numel() for _, _, ids, _ in few]
    kept = torch.cat([ids for _, _, ids, _ in few])
    keys = torch.tensor([(row.seed, row.position) for row, *_ in few], device=kept.device)
    keys = keys.repeat_interleave(torch.tensor(sizes, device=kept.device), dim=0)
    words = torch.stack(noise_words(keys[:, 0], keys[:, 1], kept >> 2), dim=-1)
    words = words.gather(1, (kept & 3).unsqueeze(1)).squeeze(1)
    for (_, r, ids, z), part in zip(few, words.split(sizes), strict=True):
        tokens[r] = ids[_winner(z, part)]


def _race_small(x: Tensor, small: list[tuple[_Row, int]], tokens: Tensor) -> None:
    """The same race over the whole of a small vocabulary, for all (row, index) at once and in exact arithmetic throughout."""
    if not small:
        return
    index = torch.tensor([r for _, r in small], device=x.device)
    temperature = torch.tensor([row.temperature for row, _ in small], dtype=torch.float32, device=x.device)
    keys = torch.tensor([(row.seed, row.position) for row, _ in small], device=x.device)[:, :, None]
    quads = _range(-(-x.shape[1] // 4), x.device)
    seed, position, quads = (key.contiguous() for key in torch.broadcast_tensors(keys[:, 0], keys[:, 1], quads))
    words = torch.stack(noise_words(seed, position, quads), dim=-1).flatten(1)[:, : x.shape[1]]
    z = x[index] * temperature.clamp(min=MIN_TEMPERATURE).reciprocal()[:, None]
    tokens[index] = (z + gumbel_of_words(words)).argmax(1)


def _filters(row: _Row) -> bool:
    return row.top_k > 0 or row.top_p < 1 or row.min_p > 0


def _winner(z: Tensor, words: Tensor) -> int:
    """First index of the greatest z + noise: an estimate of every score, then exact arithmetic on those that may win."""
    score = _estimate(z, words)
    peaks = _chunk_max(score.unsqueeze(0))[0]
    near = _at_least(score, peaks, _slack(float(peaks.amax())))
    if near.numel() == 1 and int(words[near]) < UNCLAMPED:
        return int(near)
    exact = z[near] + gumbel_of_words(words[near])
    near = _at_least(score, peaks, _slack(float(exact.amax())))
    return int(near[(z[near] + gumbel_of_words(words[near])).argmax()])


def _estimate(z: Tensor, words: Tensor) -> Tensor:
    """Scores within `_slack` of the exact ones, or above them for words past UNCLAMPED.

    U is kept off 1 there, so that rounding it in fp32 cannot make a score look worse than it is.
    """
    u = words.to(torch.float32).mul_(-(2.0**-32)).sub_(2.0**-33).clamp_(min=-1 + 2.0**-12)
    return z - u.log1p_().neg_().log_()


def _slack(score: float) -> float:
    """The least estimate that may still belong to a token whose exact score is at least `score`, itself an estimate."""
    return score - 1e-3 - 1e-5 * abs(score) if math.isfinite(score) else score


def _survivors(x: Tensor, z: Tensor, peaks: Tensor, row: _Row) -> Tensor | None:
    """Ascending token ids that pass top-k, then top-p, then min-p; None when no filter is on."""
    z_max = z.amax()
    kept = None
    if 0 < row.top_k < x.numel():
        kept = _top_k(x, peaks, row.top_k)
    if row.top_p < 1:
        kept = _top_p(x, z - z_max, peaks, kept, row.top_p)
    if row.min_p > 0:
        bound = z_max + torch.clamp(log(torch.full_like(z_max, row.min_p)), max=0.0)
        kept = (z >= bound).nonzero().squeeze(1) if kept is None else kept[z[kept] >= bound]
    return kept


def _at_least(x: Tensor, peaks: Tensor, bound: Tensor | float) -> Tensor:
    """Ascending ids with x >= bound, looking only into the chunks that hold any."""
    columns = ((peaks >= bound).nonzero() * CHUNK + _range(CHUNK, x.device)).view(-1)
    if x.numel() % CHUNK:
        columns = columns[columns < x.numel()]
    return columns[x[columns] >= bound]


def _top_k(x: Tensor, peaks: Tensor, k: int) -> Tensor:
    """Ids of the k highest logits, ties with the k-th included. The k-th chunk maximum bounds the k-th logit from below."""
    if k > peaks.numel() // 2:
        return (x >= x.topk(k).values[-1]).nonzero().squeeze(1)
    near = _at_least(x, peaks, peaks.topk(k).values[-1])
    values = x[near]
    return near[values >= values.topk(k).values[-1]]


def _top_p(x: Tensor, distance: Tensor, peaks: Tensor, kept: Tensor | None, p: float) -> Tensor:
    """Of the survivors so far, those v for which the mass strictly above x(v) is less than p of their whole mass."""
    if kept is not None:
        mass = weights(distance[kept])
        return _head(kept, x[kept], mass, mass.sum().double() * p)
    mass = weights(distance)
    target = mass.sum().double() * p
    near = _at_least(x, peaks, peaks.topk(max(1, peaks.numel() * 3 // 4)).values[-1])
    if mass[near].sum() >= target:
        return _head(near, x[near], mass[near], target)
    return (x >= _flat_bound(x, distance, mass, target)).nonzero().squeeze(1)


def _flat_bound(x: Tensor, distance: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """The lowest logit of a nucleus that is too wide to sort: a histogram finds its bin, a sort its place in the bin."""
    bins = (distance * -8.0).clamp_(max=255.0).to(torch.int64)
    below = torch.bincount(bins, mass.double(), minlength=256).cumsum(0)  # exact: integers below 2^53
    last = (below < target).sum()
    near = (bins == last).nonzero().squeeze(1)
    above = torch.where(last > 0, below[last - 1], 0.0)
    return x[_head(near, x[near], mass[near], target - above)].amin()


def _head(ids: Tensor, values: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """The ids whose values have less than `target` mass strictly above them; at least those of the maximum."""
    ordered, order = values.sort(descending=True)
    mass = mass[order]
    count = ((mass.cumsum(0) - mass).double() < target).sum().clamp(min=1)
    return ids[values >= ordered[count - 1]]
