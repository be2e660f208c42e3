"""Which launch configuration a batch gets."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels.config import CROWDED, FEW, TABLES, config_for

LARGE = 227 * 1024


def choose(rows: int, keys: int = 10**6, crowded: bool = False, dim: int = 128, memory: int = LARGE) -> tuple:
    return config_for(rows, keys, crowded, dim, torch.bfloat16, memory)


@pytest.mark.parametrize("rows, index", [(1, 0), (16, 0), (17, 1), (64, 1), (65, 2), (4096, 2)])
def test_rows_choose_the_tile(rows: int, index: int) -> None:
    for dim, padded in ((64, 64), (72, 128), (128, 128), (192, 256), (512, 512)):
        assert choose(rows, dim=dim) == TABLES["large"][padded][index]
        assert choose(rows, dim=dim, memory=99 * 1024) == TABLES["small"][padded][index]


def test_few_keys_and_full_batches_have_their_own() -> None:
    assert choose(4, keys=2048) == choose(32, keys=2048, crowded=True) == FEW[128]
    assert choose(33, keys=2048) == TABLES["large"][128][1]
    assert (choose(16, crowded=True), choose(17, crowded=True)) == CROWDED[128]
    assert choose(65, crowded=True) == choose(65)
    assert choose(4, crowded=True, memory=99 * 1024) == choose(4, memory=99 * 1024)
    assert config_for(4, 9, True, 128, torch.float32, LARGE) == TABLES["fp32"][128][0]


def test_too_wide() -> None:
    with pytest.raises(ValueError, match="head dim: expected at most 512, got 520"):
        choose(1, dim=520)
