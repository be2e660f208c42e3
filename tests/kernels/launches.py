"""The launches that the small kernels' public functions make, written down instead of run: what to compile, and how.

Recorded in a process without the interpreter, from CPU tensors that stand for CUDA ones, so that a kernel's arguments and
options are the shipped ones whatever they become.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from specdec.kernels import Sampling, accept, backend, gated_linear, linear, match, sample
from specdec.kernels import round as rounds
from specdec.kernels.columns import RowState, Settled

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TYPES = {
    torch.bool: "*i1", torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.bfloat16: "*bf16", torch.float16: "*fp16",
}  # fmt: skip


class Launch(NamedTuple):
    """A kernel with the types of its arguments (a value that is no type string is a constant) and compile options."""

    kernel: JITFunction
    types: dict[str, Any]
    options: dict[str, Any]


@contextmanager
def recorded() -> Iterator[dict[str, Launch]]:
    """Within it, launches of CPU tensors go into the dictionary, by the kernel's name and first pointer type, and ' for
    every further launch of these that differs.
    """
    found: dict[str, Launch] = {}

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        constants = {p.name for p in kernel.params if p.is_constexpr}
        types = {n: v if n in constants else type_of(v) for n, v in values.items()}
        first = next(iter(types.values()))
        name, launch = f"{kernel.__name__}({first})", Launch(kernel, types, options)
        while found.setdefault(name, launch) != launch:
            name += "'"

    with patch.object(JITFunction, "run", record), patch.object(backend, "_forced", True):
        yield found


def type_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return value if value is None or isinstance(value, bool) else "i32"


def launches(dtypes: Sequence[torch.dtype]) -> dict[str, Launch]:
    """Every kernel of sampling and products (of each dtype), looking up, accepting and of the round."""
    with recorded() as found:
        for dtype in dtypes:
            sampling(dtype)
            products(dtype)
        history, ones = torch.ones(8, 2048, dtype=torch.int32), torch.ones(8, dtype=torch.int64)
        match(history, ones, k=8)
        drafts, bounds = torch.ones(8, 8, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
        accept(torch.ones(72, dtype=torch.int64), drafts, ones, bounds, drafts[:, :2], ones > 0)
        round_of(batch=128, k=8)
    return found


def sampling(dtype: torch.dtype) -> None:
    logits, ints = torch.zeros(4, 128_256, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    floats = torch.ones(4)
    sample(logits, ints, Sampling(floats, ints.int(), floats, floats, ints), rows=ints)


def products(dtype: torch.dtype) -> None:
    """Of one token and of 16, in each of the tiles, and of a width that fills none; some with a residual, some gated."""
    for rows, width in ((8192, 1024), (1024, 8192), (1024, 1024), (960, 576), (1024, 1040)):
        weight, residual = torch.empty(rows, width, dtype=dtype), torch.empty(16, rows, dtype=dtype)
        linear(weight[:1], weight, residual[0])
        linear(weight[:16], weight)
        linear(weight[:1], weight, residual[0], residual[:1])
        if width in (8192, 1040):  # the tiles that leave the fewest registers
            linear(weight[:16], weight, residual=residual)
        gated_linear(weight[:1], weight)
        gated_linear(weight[:16], weight, residual[0])
    wide = torch.empty(8192, 4096, dtype=dtype)
    gated_linear(wide[:16], wide)  # a tile that no other product has
    gated_linear(weight[:1], weight, activation="gelu", gate_first=False)
    gated_linear(weight[:16], weight, activation="gelu_tanh", gate_first=False)


def round_of(batch: int, k: int) -> None:
    """The kernels of a round, in their order; what they leave in their outputs is not looked at."""
    total, width = batch + 3, 300
    long, flags = torch.ones(total, dtype=torch.int64), torch.ones(total, dtype=torch.bool)
    state = RowState(long, long.clone(), flags)
    table, ints, floats = torch.ones(total, width, dtype=torch.int32), torch.ones(9, total).long(), torch.ones(3, total)
    rounds.gather_rows(long[:batch], state, ints, floats, table)
    history = torch.ones(total, 4096, dtype=torch.int32)
    columns = dict.fromkeys(("index", "num_tokens", "drafter_len", "k", "limit"), long[:batch])
    tables = dict(active=flags[:batch], block_table=table[:batch], all_tokens=history)
    view = SimpleNamespace(**columns, **tables, block_size=16, max_len=4096)
    running, want = rounds.room(view, k)
    rounds.draft_depth(view, running, want, 2)
    rounds.draft_step(view, want, None, 0, 2, 49_152)
    rounds.draft_step(view, want, want, 1, 2, 49_152)
    drafts = torch.ones(k, batch, dtype=torch.int64).t()
    rounds.legal(drafts, want, want, 49_152)
    rounds.grant(want, torch.ones(batch, k), running, batch * (k + 1))
    rounds.pack(view, running, drafts, want, batch * (k + 1))
    emitted = torch.ones(batch, k + 1, dtype=torch.int64)
    rounds.settle(state, view, Settled(emitted, want, want, want, want, running, running, running, want))
