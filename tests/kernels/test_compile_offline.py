"""The shipped launch configurations, compiled for GPUs that are not there: they fit each chip's memory and hardly spill.

It is the interpreter's blind spot: shared memory, registers, and whatever only the compiler refuses. A spread of
configurations by default (a compile takes seconds), and each small kernel for one chip; SPECDEC_COMPILE_ALL=1 compiles
everything for every chip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.kernels.config import CROWDED, FEW, FP8, LARGE_MEMORY, TABLES

ROOT = Path(__file__).parents[2]

ALL = bool(os.environ.get("SPECDEC_COMPILE_ALL"))

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""KB of shared memory that one program may have, by compute capability (CUDA programming guide)."""

MAX_STACK = 160
"""Bytes of registers spilled per thread: at the edge of the table (64 rows x 128 keys with a tree, head dim 256, fp8) a few
are.
"""

Job = tuple[str, int, tuple, dict[str, Any]]


def attention_jobs() -> Iterator[Job]:
    """Every configuration in the table with the dtypes it serves, for every chip that the table is for."""
    for arch, memory in SHARED.items():
        for name in ("fp32", "large" if memory * 1024 >= LARGE_MEMORY else "small"):
            for dim, configs in TABLES[name].items():
                q, few = ("fp32", []) if name == "fp32" else ("bf16", [FEW[dim]] if dim in FEW else [])
                crowded, fp8 = (CROWDED.get(dim, ()), FP8.get(dim, configs)) if name == "large" else ((), configs)
                for config in dict.fromkeys((*configs, *few, *crowded)):
                    yield "attention", arch, config, dict(q=q, kv=q, dims=[dim, dim])
                for config in dict.fromkeys((*fp8, *few)) if q == "bf16" and arch >= 89 else ():
                    for kv in ("i16", "fp8e4nv"):
                        yield "attention", arch, config, dict(q=q, kv=kv, dims=[dim, dim])


def option_jobs() -> Iterator[Job]:
    """Each option of the kernel, and the small kernels around it."""
    config = TABLES["large"][128][1]
    invariant = dict(TREE="*i64", tree_words=2, PERSISTENT=True, page=3, dims=[80, 96], heads=[3, 5])
    yield "attention", 90, CROWDED[128][1]._replace(fused=False), invariant
    for options in (
        dict(window=True, SINKS="*fp32", LSE=None),
        dict(softcap="fp32", SLOPES="*fp32", causal=False),
        dict(TREE="*i64", tree_words=1),
        dict(kv="fp8e4nv", K_SCALE="*fp32", V_SCALE="*fp32", q="fp16"),
        dict(kv="i16", K_SCALE="*fp32", V_SCALE="*fp32", softcap="fp32", dims=[80, 72]),
        dict(kv="i16", dims=[72, 64], ALIKE=False),
        dict(kv="fp8e4nv", dims=[64, 32], ALIKE=False),
    ):
        yield "attention", 90, config, options
    yield (
        "attention",
        80,
        TABLES["small"][128][1],
        dict(ALIKE=False, NARROW=False),
    )  # K and V unlike, a pool past 2^31 elements
    for arch in SHARED if ALL else [90]:
        yield "plan", arch, config, dict(fixed=arch == 80)
        yield "reduce", arch, config, {}
        yield "store", arch, config, dict(kv="fp8e4nv" if arch >= 89 else "bf16")
        yield "move", arch, config, {}


def jobs() -> list[Job]:
    every = list(attention_jobs())
    return [*option_jobs(), *(every if ALL else every[::41])]


def compile_all(jobs: list[Job]) -> list[dict[str, Any]]:
    """In a process of its own, since one in which Triton's interpreter is on can't compile."""
    environment = os.environ | dict(TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))
    command = [sys.executable, str(Path(__file__).with_name("offline.py")), "every" if ALL else "some"]
    done = subprocess.run(command, input=json.dumps(jobs), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    return compile_all(jobs())


def test_all_compile(compiled: list[dict[str, Any]]) -> None:
    assert [result["kernel"] for result in compiled[: len(jobs())]] == [name for name, *_ in jobs()]
    small = {result["kernel"].split("(")[0] for result in compiled[len(jobs()) :]}
    assert small >= {
        "select_kernel",
        "race_kernel",
        "winner_kernel",
        "_match",
        "_accept",
        "grant_kernel",
        "settle_kernel",
    }
    assert [result for result in compiled if "error" in result] == []


def test_shared_memory_fits(compiled: list[dict[str, Any]]) -> None:
    assert [result for result in compiled if result["shared"] > SHARED[result["arch"]] * 1024] == []


def test_little_spills(compiled: list[dict[str, Any]]) -> None:
    over = [result for result in compiled if result["stack"] > MAX_STACK]
    assert not over, "\n".join(
        f"{r['kernel']} for sm_{r['arch']}: {r['stack']} bytes, {r.get('config', '')} {r.get('keywords', '')}"
        for r in over
    )


def test_wgmma_reads_an_address_in_one_layout(compiled: list[dict[str, Any]]) -> None:
    """Where two kinds of descriptors share an address, ptxas 12.8 leaves it out of one: an illegal memory access."""
    attention = [result for result in compiled if result["kernel"] == "attention" and result["arch"] == 90]
    assert any(result["layouts"] == 1 for result in attention)
    assert [result for result in attention if result["layouts"] > 1] == []
