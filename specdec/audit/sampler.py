"""Level 1: the sampling kernel that serves, against probabilities computed here; and the far tail of its noise."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.audit.report import Check, check
from specdec.audit.statistics import ALPHA, chi_square
from specdec.kernels import Sampling, sample
from specdec.kernels.reference.philox import noise_words

DRAWS, SIZE = {"cpu": 2_000, "cuda": 100_000}, 24
SETTINGS = (
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=9),
    dict(temperature=1.3, top_p=0.8),
    dict(temperature=1.0, min_p=0.1),
    dict(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02),
)

EXTREMES = (
    (2317303, 21), (3254997, 56), (3441155, 58), (3474781, 4), (3989196, 5), (4260901, 28), (4905117, 51)
)  # fmt: skip
"""(position, token) of seed 0 where Philox gives a word below 64: noise of 18 to 21.8, one of 67 million draws."""


def checks(device: torch.device) -> list[Check]:
    found = [_frequencies(device, **setting) for setting in SETTINGS]
    return [*found, _tail(device)]


def _frequencies(device: torch.device, **setting: float) -> Check:
    """Half of the draws with one seed over positions, half with one position over seeds."""
    logits = torch.randn(SIZE, generator=torch.Generator().manual_seed(5)) * 2
    draws = DRAWS.get(device.type, DRAWS["cpu"])
    many, one = torch.arange(draws // 2), torch.full((draws // 2,), 7)
    columns = _columns(torch.cat([one, many]), **setting)
    rows = logits.expand(draws, SIZE).contiguous().to(device)
    tokens = sample(rows, torch.cat([many, one]).to(device), Sampling(*(c.to(device) for c in columns)))
    p = chi_square(tokens.cpu().bincount(minlength=SIZE), draws * _probabilities(logits.double(), **setting))
    name = ", ".join(f"{key} {value:g}" for key, value in setting.items())
    return check(1, f"{draws} draws, {name}", p > ALPHA, f"p = {p:.3g}", f"> {ALPHA:g}", ALPHA)


def _columns(seed: Tensor, temperature: float, top_k: float = 0, top_p: float = 1, min_p: float = 0) -> Sampling:
    def column(value: float) -> Tensor:
        return torch.full(seed.shape, value, dtype=torch.float32)

    return Sampling(column(temperature), column(top_k).long(), column(top_p), column(min_p), seed)


def _probabilities(logits: Tensor, temperature: float, top_k: float = 0, top_p: float = 1, min_p: float = 0) -> Tensor:
    """[V] fp64, by the plainest code there is: sort, cut, cut, cut, renormalise."""
    p, order = (logits / temperature).softmax(0).sort(descending=True)
    if top_k:
        p = torch.where(torch.arange(len(p)) < top_k, p, 0)
    p = p / p.sum()
    p = torch.where(p.cumsum(0) - p < top_p, p, 0)
    p = torch.where(p >= min_p * p[0], p, 0)
    return torch.zeros_like(p).scatter(0, order, p / p.sum())


def _tail(device: torch.device) -> Check:
    """Tokens of extreme noise win by a hair and lose by a hair, where noise that is cut off would lose both times."""
    right = 0
    for position, token in EXTREMES:
        noise = _noise(position)
        lead = noise[token] - noise.index_fill(0, torch.tensor([token]), -torch.inf).max()
        for hair in (0.01, -0.01):
            logits = torch.zeros(1, 64)
            logits[0, token] = hair - lead
            columns = Sampling(*(c.to(device) for c in _columns(torch.zeros(1, dtype=torch.int64), 1.0)))
            won = int(sample(logits.to(device), torch.tensor([position], device=device), columns)[0]) == token
            right += won == (hair > 0)
    count = 2 * len(EXTREMES)
    return check(1, "the tail of the noise", right == count, f"{right} of {count} rare draws right", f"{count}")


def _noise(position: int) -> Tensor:
    """[64] fp64: -log(-log(1 - U)), U = (word + 1/2) 2^-32, of seed 0."""
    words = torch.stack([torch.as_tensor(w) for w in noise_words(0, position, torch.arange(16))], -1).flatten()
    return -(-torch.log1p(-(words.double() + 0.5) * 2.0**-32)).log()
