"""Launch configurations: a small table by head dim, query rows, dtype and shared memory. Nothing is tried at run time."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Config(NamedTuple):
    """How one attention launch is cut and compiled."""

    block_m: int  # query rows (tokens x heads of a group) of a tile
    block_n: int  # keys of a tile
    warps: int
    stages: int  # depth of the load pipeline
    workers: int  # items that the plan aims at, per multiprocessor
    fused: bool  # splits are reduced by the program that ends last, not by a second kernel


# By padded head dim: up to 16 query rows, up to 64, more. 17 rows and more share the 64-row tile, the smallest of wgmma: a
# 32-row one was slower at 32 rows than that one at 64, and prompts gain from two of them per multiprocessor.
_LARGE = {
    64: (Config(16, 128, 4, 4, 2, True), Config(64, 64, 4, 3, 2, False), Config(128, 128, 8, 2, 2, False)),
    128: (Config(16, 128, 4, 3, 1, True), Config(64, 128, 4, 3, 1, False), Config(64, 64, 4, 3, 2, False)),
    256: (Config(16, 32, 4, 3, 2, True), Config(64, 32, 8, 3, 2, False), Config(128, 32, 8, 2, 1, False)),
    512: (Config(16, 16, 8, 3, 2, True),) * 3,
}

# Where there is a sequence and KV head for every multiprocessor, little is split: smaller tiles, more of them at a time, and
# no second kernel for the few splits that there are. Up to 16 query rows, up to 64.
CROWDED = {128: (Config(16, 64, 4, 4, 2, True), Config(64, 64, 4, 3, 1, True))}

# Of fp8 keys there are more in a second, and each is first turned into fp16, once for every 16 or 32 rows: large tiles, two of
# them at a time. Up to 16 query rows, up to 32, up to 64, more.
FP8 = {
    128: (
        Config(16, 128, 4, 4, 2, True),
        Config(32, 128, 4, 3, 2, True),
        Config(64, 64, 4, 3, 2, True),
        Config(64, 128, 4, 3, 2, False),
    ),
    256: (Config(16, 32, 4, 3, 2, True), *(Config(64, 32, 8, 3, 2, False),) * 3),
}

# For 99 KB of shared memory, and where no instruction multiplies from shared memory, so that tiles live in registers.
_SMALL = {
    64: (Config(16, 128, 4, 3, 2, True), Config(64, 64, 4, 3, 2, False), Config(128, 64, 8, 3, 2, False)),
    128: (Config(16, 64, 4, 3, 2, True), Config(64, 32, 4, 3, 2, False), Config(128, 32, 8, 3, 1, False)),
    256: (Config(16, 32, 4, 3, 2, True), Config(64, 32, 8, 2, 2, False), Config(64, 32, 8, 2, 1, False)),
    512: (Config(16, 16, 8, 3, 2, True),) * 3,
}

# Products of fp32 run on the ordinary units, from registers: small tiles, many warps.
_FP32 = {
    64: (Config(16, 32, 8, 2, 2, True), Config(32, 16, 8, 2, 2, False), Config(64, 16, 8, 2, 2, False)),
    128: (Config(16, 32, 8, 2, 2, True), Config(32, 16, 8, 2, 2, False), Config(32, 16, 8, 2, 2, False)),
    256: (Config(16, 16, 8, 2, 2, True), Config(16, 16, 8, 2, 2, False), Config(16, 16, 8, 2, 2, False)),
    512: (Config(16, 16, 8, 2, 2, True),) * 3,
}

# Where all keys of the batch are this few, time is latency: two small tiles of rows beat one large one, though keys are
# then read twice, and one worker per multiprocessor leaves no second wave.
FEW_KEYS = 2048
FEW = {64: Config(16, 128, 4, 3, 1, True), 128: Config(16, 64, 4, 3, 1, True)}

TABLES = {"large": _LARGE, "small": _SMALL, "fp32": _FP32}

LARGE_MEMORY = 200 * 1024


def table_name(dtype: torch.dtype, shared_memory: int) -> str:
    """The key in TABLES for queries of `dtype` on a GPU whose programs may have `shared_memory` bytes."""
    if dtype == torch.float32:
        return "fp32"
    return "large" if shared_memory >= LARGE_MEMORY else "small"


def config_for(
    rows: int, keys: int, crowded: bool, dim: int, dtypes: tuple[torch.dtype, torch.dtype], shared_memory: int
) -> Config:
    """The configuration for up to `rows` query rows of a sequence, at head dim `dim`. Raises ValueError above 512.

    keys: how many the batch has at most, all its block tables full. crowded: whether its sequences x KV heads are as many
    as there are multiprocessors. dtypes: of queries and of the caches.
    """
    name, dim_padded = table_name(dtypes[0], shared_memory), max(64, padded(dim))
    if keys <= FEW_KEYS and rows <= 32 and name != "fp32" and dim_padded in FEW:
        return FEW[dim_padded]
    if dtypes[1] == torch.float8_e4m3fn and name == "large" and dim_padded in FP8:
        return FP8[dim_padded][bisect_left((16, 32, 64), rows)]
    if crowded and rows <= 64 and name == "large" and dim_padded in CROWDED:
        return CROWDED[dim_padded][0 if rows <= 16 else 1]
    if dim > max(TABLES[name]):
        raise ValueError(f"head dim: expected at most {max(TABLES[name])}, got {dim}")
    return TABLES[name][dim_padded][0 if rows <= 16 else 1 if rows <= 64 else 2]


def padded(dim: int) -> int:
    """The columns of a tile that holds `dim` of them: a power of two, and as many as a matrix product asks for."""
    return max(16, 1 << (dim - 1).bit_length())


def tile_columns(dim: int, other: int, rows: int, pack: int) -> int:
    """The columns of a tile of K (or V), whose head dim is `dim` and V's (or K's) `other`, for tiles of `rows` query rows.

    wgmma, from 64 rows, reads 64 columns and more, 32 and 16 in different layouts. fp8 keys and values, once of 16 bits, take
    turns in the same shared memory, and where their layouts differ, ptxas 12.8 leaves the address out of a descriptor: an
    illegal memory access. So the narrower tile is padded until it is read as the other is. pack: columns in one word.
    """
    return max(padded(dim), min(padded(other), 64 * pack) if rows >= 64 else 0)


def device_limits(tensor: Tensor) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that one program may have) of the GPU that holds `tensor`."""
    return _limits(tensor.device.index) if tensor.is_cuda else (4, 99 * 1024)  # the interpreter: any numbers do


@cache
def _limits(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
