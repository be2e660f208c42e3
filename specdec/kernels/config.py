"""Launch configurations: a small table by head dim, query rows and the caches' dtype. Nothing is tried at run time."""

from __future__ import annotations

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


def config_for(rows: int, dim: int, q_dtype: torch.dtype, kv_bytes: int, shared_memory: int) -> Config:
    """The configuration for up to `rows` query rows of a sequence, at head dim `dim` padded to a power of two."""
    block_m = 16 if rows <= 16 else 64 if rows <= 64 else 128
    block_n = max(16, min(128, 64 * 256 // (dim * kv_bytes)))
    return Config(block_m, block_n, 4 if block_m < 128 else 8, 3, 2, block_m == 16)


def device_limits(tensor: Tensor) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that one program may have) of the GPU that holds `tensor`."""
    return _limits(tensor.device.index) if tensor.is_cuda else (4, 99 * 1024)  # the interpreter: any numbers do


@cache
def _limits(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
