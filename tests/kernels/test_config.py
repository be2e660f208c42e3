"""Which launch configuration a batch gets."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels.config import CROWDED, FEW, FP8, TABLES, config_for, padded, tile_columns

LARGE = 227 * 1024
BF16 = torch.bfloat16


def choose(
    rows: int, keys: int = 10**6, crowded: bool = False, dim: int = 128, memory: int = LARGE, kv: torch.dtype = BF16
) -> tuple:
    return config_for(rows, keys, crowded, dim, (BF16, kv), memory)


@pytest.mark.parametrize("rows, index", [(1, 0), (16, 0), (17, 1), (64, 1), (65, 2), (4096, 2)])
def test_rows_choose_the_tile(rows: int, index: int) -> None:
    for dim, columns in ((64, 64), (72, 128), (128, 128), (192, 256), (512, 512)):
        assert choose(rows, dim=dim) == TABLES["large"][columns][index]
        assert choose(rows, dim=dim, memory=99 * 1024) == TABLES["small"][columns][index]


def test_few_keys_and_full_batches_have_their_own() -> None:
    assert choose(4, keys=2048) == choose(32, keys=2048, crowded=True) == FEW[128]
    assert choose(33, keys=2048) == TABLES["large"][128][1]
    assert (choose(16, crowded=True), choose(17, crowded=True)) == CROWDED[128]
    assert choose(65, crowded=True) == choose(65)
    assert choose(4, crowded=True, memory=99 * 1024) == choose(4, memory=99 * 1024)
    assert config_for(4, 9, True, 128, (torch.float32, torch.float32), LARGE) == TABLES["fp32"][128][0]


@pytest.mark.parametrize("rows, index", [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (64, 2), (65, 3), (4096, 3)])
def test_fp8_caches_have_their_own(rows: int, index: int) -> None:
    kv = torch.float8_e4m3fn
    assert choose(rows, kv=kv) == choose(rows, kv=kv, crowded=True) == choose(rows, kv=kv, dim=80) == FP8[128][index]
    assert choose(rows, kv=kv, dim=64) == choose(rows, dim=64)
    assert choose(rows, kv=kv, dim=256) == FP8[256][index]
    assert choose(rows, kv=kv, memory=99 * 1024) == choose(rows, memory=99 * 1024)


def test_too_wide() -> None:
    with pytest.raises(ValueError, match="head dim: expected at most 512, got 520"):
        choose(1, dim=520)


@pytest.mark.parametrize(
    "dims, pack, want", [((72, 64), 1, (128, 64)), ((72, 64), 2, (128, 128)), ((32, 256), 2, (128, 256))]
)
def test_tall_tiles_of_keys_and_values_are_read_alike(dims: tuple, pack: int, want: tuple) -> None:
    """As wgmma reads shared memory: 128 bytes of 16 bits side by side, where either has as many."""
    assert tuple(tile_columns(*both, 64, pack) for both in (dims, dims[::-1])) == want
    assert tuple(tile_columns(*both, 16, pack) for both in (dims, dims[::-1])) == tuple(padded(dim) for dim in dims)
