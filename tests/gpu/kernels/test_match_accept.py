"""Looking drafts up and accepting them on a GPU: what the twins give, for rows of every kind at once."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels import accept, match


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows, width, vocabulary", [(1, 1, 2), (7, 60, 3), (128, 2_049, 4), (16, 9_000, 300)])
def test_match_is_the_twins(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Small vocabularies, so that matches are many, long and tied; what lies past a row's end is not text."""
    generator = torch.Generator().manual_seed(width)
    history = torch.randint(0, vocabulary, (rows, width), generator=generator).to(dtype)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    history[torch.arange(width) >= lengths[:, None]] = -7
    for k, max_match, min_match in ((1, 16, 1), (4, 3, 2), (9, 1, 1)):
        options = dict(k=k, max_match=max_match, min_match=min_match)
        for got, want in zip(
            match(*on_gpu(history, lengths), **options), match(history, lengths, **options), strict=True
        ):
            assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("rows, k", [(1, 1), (5, 4), (128, 4), (300, 9)])
def test_accept_is_the_twins(rows: int, k: int) -> None:
    """Rows that are stopped, end at a stop id, draw nothing, or draft fewer than k, all in one batch."""
    generator = torch.Generator().manual_seed(rows)
    draw = lambda low, high, *size: torch.randint(low, high, size, generator=generator)  # noqa: E731
    running = draw(0, 5, rows) > 0
    num_drafts = draw(0, k + 1, rows)
    bounds = torch.cat([torch.zeros(1).long(), torch.where(running, num_drafts + 1, 0).cumsum(0)]).int()
    drafts = draw(0, 3, k, rows).t()
    tokens = draw(-1, 3, int(bounds[-1]) + 2)
    stops = draw(-1, 12, rows, 3)
    given = (tokens, drafts, num_drafts, bounds, stops, running)
    for got, want in zip(accept(*on_gpu(*given)), accept(*given), strict=True):
        assert torch.equal(got.cpu(), want)
