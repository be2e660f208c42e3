"""Trying launch configurations of paged attention, to choose the table that ships. No call of the library ever does this."""

from __future__ import annotations

import itertools
import math
from importlib import import_module
from typing import Any

import torch
from kernel_points import GRID, Batch, Point, Pool, check, make_batch, uniform
from kernel_sections import RECORDED, recorded
from kernel_timing import seconds

from specdec.kernels.config import Config

KINDS = ("decode", "tall", "prefill", "dims", "store")

TILES = {
    "decode": [
        (16, 64, 4, 3), (16, 64, 4, 4), (16, 64, 2, 3), (16, 64, 2, 4), (16, 32, 4, 4), (16, 128, 8, 3), (16, 128, 4, 3),
        (16, 128, 4, 2),
    ],
    "tall": [
        (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2), (64, 32, 4, 4), (64, 128, 4, 3), (32, 64, 4, 3), (32, 128, 4, 3),
    ],
    "prefill": [
        (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 3),
    ],
}  # fmt: skip
"""(block_m, block_n, warps, stages) of each kind of point."""

DIM_TILES = {
    64: [(16, 128, 4, 3), (16, 128, 4, 4), (16, 64, 4, 4), (16, 256, 4, 2), (16, 256, 4, 3)],
    256: [(16, 32, 4, 3), (16, 32, 4, 4), (16, 32, 8, 3), (16, 64, 8, 2), (16, 64, 4, 2), (16, 64, 8, 3)],
}
WORKERS = (1, 2, 3, 4, 6)
store_module = import_module("specdec.kernels.store_kv")  # its name in the package is the function's


def configs(kind: str, dim: int = 128) -> list[Config]:
    """Fused and not, wherever a split is to be expected."""
    tiles = DIM_TILES[dim] if kind == "dims" else TILES[kind]
    reductions = (False,) if kind == "prefill" else (True, False)
    workers = (1, 2) if kind == "prefill" else WORKERS
    return [Config(*tile, w, fused) for tile, w, fused in itertools.product(tiles, workers, reductions)]


def points(kind: str) -> list[Point]:
    if kind == "prefill":
        return [Point((past + q,), q) for q in (512, 2048, 8192) for past in (0, 8192, 65536)]
    if kind == "dims":
        return [uniform(b, n, 4, dim=d) for d in DIM_TILES for b, n in ((1, 8192), (8, 8192), (32, 4096))]
    queries = (1, 4) if kind == "decode" else (8, 16)
    return [uniform(b, n, q) for b, n in GRID for q in queries]


def run(bandwidth: float, kind: str, most: int) -> dict[str, Any]:
    """Microseconds (one call a graph) of each configuration at each point of at most `most` keys; prints the best of a
    point, then of all.
    """
    if kind == "store":
        return run_store()
    pool, table = Pool(), {}
    every = [point for point in points(kind) if sum(point.lengths) <= most]
    room = max(sum(point.lengths) for point in every)
    for point in every:
        batch = make_batch(point, pool, room)
        times = measure(batch, configs(kind, point.dim))
        name = f"{len(point.lengths)} x {point.lengths[0]}, {point.q_len}, {point.dim}"
        best = sorted(times, key=times.__getitem__)[:3]
        print(f"{name:<24}" + "   ".join(f"{times[c]:8.1f} {tuple(c)}" for c in best), flush=True)
        table[name] = {str(tuple(config)): time for config, time in times.items()}
    fixed(kind, every, list(table.values()), bandwidth)
    return table


def run_store() -> dict[str, Any]:
    """Microseconds of store_kv by the tokens and columns of a program."""
    found: dict[str, Any] = {}
    for tokens in (5, 320, 8192, 65536):
        k, v = torch.randn(2, tokens, 8, 128, dtype=torch.bfloat16, device="cuda")
        k_cache, v_cache = torch.zeros(2, tokens // 16 + 1, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
        slots = torch.randperm(tokens, device="cuda")
        times = {}
        for lot in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024)):
            store_module.TOKENS, store_module.COLUMNS = lot
            call = lambda: store_module.store_kv(k, v, k_cache, v_cache, slots)  # noqa: B023, E731
            times[str(lot)] = seconds(*[call] * 10) * 1e6
        best = sorted(times.items(), key=lambda item: item[1])[:5]
        print(f"store {tokens:>6}  " + "   ".join(f"{time:.1f} {lot}" for lot, time in best), flush=True)
        found[str(tokens)] = times
    return found


def measure(batch: Batch, candidates: list[Config]) -> dict[Config, float]:
    """Those that are right, in microseconds. One that does not fit the chip, or is wrong, is named and left out."""
    times = {}
    for config in candidates:
        if (problem := _try(batch, config)) is None:
            times[config] = seconds(batch.call(0, config), budget=0.008) * 1e6
        else:
            print(f"    {tuple(config)}: {problem}", flush=True)
    return times


def _try(batch: Batch, config: Config) -> str | None:
    try:
        error = check(batch, config)
    except Exception as problem:  # the compiler's and the driver's are many
        return f"{type(problem).__name__}: {problem}".splitlines()[0][:90]
    return None if error < 8e-3 else f"error {error:.1e}"


def fixed(kind: str, every: list[Point], table: list[dict[str, float]], bandwidth: float) -> None:
    """The ten best single configurations by the geometric mean of their time over FA3's (or over the floor)."""
    scores = []
    for config in set.intersection(*(set(times) for times in table)) if table else set():
        ratios = []
        for point, times in zip(every, table, strict=True):
            ratios.append(times[config] * bandwidth / base(point, kind, bandwidth))
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        scores.append((mean, max(ratios), config))
    print("fixed configurations: geometric mean, worst")
    for mean, worst, config in sorted(scores)[:10]:
        print(f"  {mean:.3f}  {worst:.3f}  {config}")


def base(point: Point, kind: str, bandwidth: float) -> float:
    """What a time in microseconds x bytes per second is compared with."""
    if kind in ("decode", "tall"):
        fa3 = recorded(len(point.lengths), point.lengths[0], point.q_len)["fa3"]
        return fa3 * 1e3 * RECORDED["copy_gb_s"] * 1e9
    return point.bytes / bandwidth * 1e6 * bandwidth
