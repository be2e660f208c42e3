"""Compile kernels for GPUs that are not there: registers, stack and shared memory of each, or the compiler's error.

Run as a program it compiles a list of kernels, and prints a JSON line each. The tests run it so, since a process in which
Triton's interpreter is on can't compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.kernels.attention_kernel import attention_kernel, reduce_kernel
from specdec.kernels.config import padded, tile_columns
from specdec.kernels.plan_kernel import plan_kernel
from specdec.kernels.store_kernel import move_kernel, store_kernel
from tests.kernels.launches import Launch, launches

ARCHS = (80, 86, 89, 90, 120)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compile_for(kernel: Any, arch: int, types: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Compile `kernel` with its arguments typed as in `types`: type strings, or values of constants."""
    names = kernel.arg_names
    if "DEPENDENT" in names:
        types = types | dict(DEPENDENT=arch >= 90)
    constexpr = {p.name for p in kernel.params if p.is_constexpr}
    constants = {n: v for n, v in types.items() if n in constexpr or not isinstance(v, str)}
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    strides = ("sq", "sk", "sv", "so", "stride")
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n.startswith(strides)]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    resources = _resources(compiled.asm["cubin"])
    return dict(shared=compiled.metadata.shared, layouts=_layouts(compiled.asm["ptx"])) | resources


def _layouts(ptx: str) -> int:
    """In how many layouts wgmma reads shared memory at one address, at most; 0 without wgmma.

    A descriptor is an address in bits 0 to 13 of 64 (PTX ISA, matrix descriptor) and a constant above it, made in one sum.
    """
    found = defaultdict(set)
    for address, constant in re.findall(r"(?:or|add)\.[bs]64\s+%rd\d+, (%rd\d+), (-?\d+);", ptx):
        if (constant := int(constant) % 2**64) >> 62:  # the top bits, of which all layouts but the unused one have one
            found[address].add(constant >> 16)
    return max(map(len, found.values()), default=0)


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return dict(registers=int(found[1]), stack=int(found[2]))


def attention_types(
    config: tuple, q: str = "bf16", kv: str | None = None, heads: tuple[int, int] = (8, 4), dims: tuple[int, int] = (128, 128),
    page: int = 16, tree_words: int = 0, causal: bool = True, **present: Any,
) -> dict[str, Any]:  # fmt: skip
    """Types of attention_kernel's arguments. `present` overrides: SINKS="*fp32", window=True, softcap="fp32", LSE=None."""
    block_m, block_n, _, _, _, fused = config
    kv = kv or q
    types: dict[str, Any] = dict.fromkeys(attention_kernel.arg_names, "i32")
    types |= dict(Q=f"*{q}", K=f"*{kv}", V=f"*{kv}", O=f"*{q}", LSE="*fp32", PARTIAL_O="*fp32", PARTIAL_LSE="*fp32")
    types |= dict.fromkeys(("HEAD", "ITEMS", "PAIRS", "COUNTERS", "TABLE"), "*i32")
    types |= dict.fromkeys(("SINKS", "SLOPES", "TREE", "K_SCALE", "V_SCALE", "softcap")) | dict(scale="fp32")
    d_pad, dv_pad = (tile_columns(*both, block_m, 2 if kv == "i16" else 1) for both in (dims, dims[::-1]))
    types |= dict(H_KV=heads[0], G=heads[1], D=dims[0], DV=dims[1], D_PAD=d_pad, DV_PAD=dv_pad)
    types |= dict(PAGE=page, BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal, WINDOW=bool(present.pop("window", False)))
    return (
        types
        | dict(TREE_WORDS=tree_words, FUSED=fused, ALIKE=True, NARROW=True, UPCAST=False, PERSISTENT=False)
        | present
    )


def reduce_types(config: tuple, q: str = "bf16", heads: tuple[int, int] = (8, 4), dim: int = 128) -> dict[str, Any]:
    types: dict[str, Any] = dict(HEAD="*i32", PAIRS="*i32", PARTIAL_O="*fp32", PARTIAL_LSE="*fp32", O=f"*{q}")
    types |= dict(LSE="*fp32", SINKS="*fp32", so_t="i32", so_h="i32", H_KV=heads[0], G=heads[1], DV=dim)
    return types | dict(DV_PAD=padded(dim), BLOCK_M=config[0], ROWS=8)


def plan_types(
    config: tuple, heads: tuple[int, int] = (8, 4), window: bool = True, fixed: bool = False
) -> dict[str, Any]:
    types: dict[str, Any] = {n: "*i32" if n.isupper() else "i32" for n in plan_kernel.arg_names}
    types |= dict(H_KV=heads[0], G=heads[1], BLOCK_M=config[0], BLOCK_N=config[1], CAUSAL=True, WINDOW=window)
    return types | dict(TREE_NODES=64, FIXED=fixed, BLOCK_R=256, BLOCK_I=128)


def store_types(
    config: tuple, q: str = "bf16", kv: str | None = None, slots: str = "i64", dim: int = 128
) -> dict[str, Any]:
    types: dict[str, Any] = dict.fromkeys(store_kernel.arg_names, "i32")
    kv = kv or q
    types |= dict(
        K=f"*{q}", V=f"*{q}", K_CACHE=f"*{kv}", V_CACHE=f"*{kv}", SLOTS=f"*{slots}", K_SCALE=None, V_SCALE=None
    )
    return types | dict(PAGE=16, H=8, D=dim, DV=dim, TOKENS=4, COLUMNS=1024)


def move_types(config: tuple, kv: str = "bf16") -> dict[str, Any]:
    types: dict[str, Any] = dict.fromkeys(move_kernel.arg_names, "i32")
    types |= dict(CACHE=f"*{kv}", SOURCE="*i64", TARGET="*i64")
    return types | dict(PAGE=16, H=8, D=128, MOVES=16, COLUMNS=256)


KERNELS = {
    "attention": (attention_kernel, attention_types),
    "reduce": (reduce_kernel, reduce_types),
    "plan": (plan_kernel, plan_types),
    "store": (store_kernel, store_types),
    "move": (move_kernel, move_types),
}


def launch_jobs(every: bool) -> Iterator[tuple[dict[str, Any], Launch]]:
    """The recorded launches, each for the next of ARCHS, or `every` one for all."""
    for i, (name, launch) in enumerate(
        launches([torch.bfloat16, torch.float32] if every else [torch.bfloat16]).items()
    ):
        for arch in ARCHS if every else [ARCHS[i % len(ARCHS)]]:
            yield dict(kernel=name, arch=arch), launch


def attention_launch(name: str, config: tuple, keywords: dict[str, Any]) -> Launch:
    kernel, types = KERNELS[name]
    return Launch(kernel, types(config, **keywords), dict(num_warps=config[2], num_stages=config[3]))


def main() -> None:
    """Compiles jobs from standard input, JSON of a list of [kernel, arch, config, keywords of its types function], then
    the recorded launches, if the argument `every` is given for all of ARCHS.
    """
    jobs: list[tuple[dict[str, Any], Launch]] = []
    for name, arch, config, keywords in json.load(sys.stdin):
        job = dict(kernel=name, arch=arch, config=config, keywords=keywords)
        jobs.append((job, attention_launch(name, config, keywords)))
    for job, launch in [*jobs, *launch_jobs("every" in sys.argv)]:
        try:
            result = compile_for(launch.kernel, job["arch"], launch.types, **launch.options)
        except Exception as error:  # whatever the compiler raises is the result
            result = dict(error=f"{type(error).__name__}: {error}"[:2000])
        print(json.dumps(job | result), flush=True)


if __name__ == "__main__":
    main()
