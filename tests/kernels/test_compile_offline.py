"""The shipped launch configurations, compiled for GPUs that are not there: they fit each chip's memory and hardly spill.

It is the interpreter's blind spot: shared memory, registers, and whatever only the compiler refuses. A spread of
configurations by default (a compile takes seconds); SPECDEC_COMPILE_ALL=1 compiles every one for every chip.
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

from specdec.kernels.config import LARGE_MEMORY, TABLES

ROOT = Path(__file__).parents[2]

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""KB of shared memory that one program may have, by compute capability (CUDA programming guide)."""

MAX_STACK = 128
"""Bytes of registers spilled per thread: at the edge of the table (head dim 256, fp8) a few are."""

Job = tuple[str, int, tuple, dict[str, Any]]


def attention_jobs() -> Iterator[Job]:
    """Every configuration in the table with the dtypes it serves, for every chip that the table is for."""
    for arch, memory in SHARED.items():
        for name in ("fp32", "large" if memory * 1024 >= LARGE_MEMORY else "small"):
            for dim, configs in TABLES[name].items():
                for config in dict.fromkeys(configs):
                    for kv in ["fp32"] if name == "fp32" else ["bf16", "fp8e4nv"] if arch >= 89 else ["bf16"]:
                        yield (
                            "attention",
                            arch,
                            config,
                            dict(q="fp32" if name == "fp32" else "bf16", kv=kv, dims=[dim, dim]),
                        )


def option_jobs() -> Iterator[Job]:
    """Each option of the kernel, and the small kernels around it."""
    config = TABLES["large"][128][1]
    for options in (
        dict(window=True, SINKS="*fp32", LSE=None),
        dict(softcap="fp32", SLOPES="*fp32", causal=False),
        dict(TREE="*i64", tree_words=2, PERSISTENT=True, page=3, dims=[80, 96], heads=[3, 5]),
        dict(kv="fp8e4nv", K_SCALE="*fp32", V_SCALE="*fp32", q="fp16"),
    ):
        yield "attention", 90, config, options
    for arch in (80, 90):
        yield "plan", arch, config, dict(fixed=arch == 80)
        yield "reduce", arch, config, {}
        yield "store", arch, config, dict(kv="fp8e4nv" if arch == 90 else "bf16")
        yield "move", arch, config, {}


def jobs() -> list[Job]:
    every = list(attention_jobs())
    return [*option_jobs(), *(every if os.environ.get("SPECDEC_COMPILE_ALL") else every[::19])]


def compile_all(jobs: list[Job]) -> list[dict[str, Any]]:
    """In a process of its own, since one in which Triton's interpreter is on can't compile."""
    environment = os.environ | dict(TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))
    command = [sys.executable, str(Path(__file__).with_name("offline.py"))]
    done = subprocess.run(command, input=json.dumps(jobs), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    return compile_all(jobs())


def test_all_compile(compiled: list[dict[str, Any]]) -> None:
    assert len(compiled) == len(jobs())
    assert [result for result in compiled if "error" in result] == []


def test_shared_memory_fits(compiled: list[dict[str, Any]]) -> None:
    assert [result for result in compiled if result["shared"] > SHARED[result["arch"]] * 1024] == []


def test_little_spills(compiled: list[dict[str, Any]]) -> None:
    assert [result for result in compiled if result["stack"] > MAX_STACK] == []
