"""The parts of the kernel benchmark; each prints its table and returns its rows for the report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kernel_peers import contiguous, peers
from kernel_points import GRID, QUERIES, Batch, Point, Pool, check, make_batch, uniform
from kernel_timing import seconds
from torch.nn.attention.bias import causal_lower_right

from specdec.kernels import Sampling, accept, match, move_kv, sample, store_kv

RECORDED = json.loads((Path(__file__).parent / "data" / "peers_kernels.json").read_text())
LIMIT = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 1e-5}
"""||error|| / ||output|| that the rounding of weights and outputs explains."""

Row = dict[str, Any]


class Wanted(NamedTuple):
    """What to time: the peers too, and of the grid and the variants only points whose name holds `points`."""

    peers: bool = False
    points: str = ""


def recorded(batch: int, length: int, q_len: int) -> dict[str, float]:
    """Milliseconds of the peers at a point of the grid, as recorded."""
    return next(p for p in RECORDED["points"] if (p["B"], p["L"], p["Q"]) == (batch, length, q_len))


def show(*cells: object) -> None:
    """One line of a table: a wide first column, then narrow ones."""
    texts = [f"{cell:.3g}" if isinstance(cell, float) and abs(cell) < 100 else str(cell) for cell in cells]
    texts = [
        f"{cell:.0f}" if isinstance(cell, float) and abs(cell) >= 100 else t
        for cell, t in zip(cells, texts, strict=True)
    ]
    print(f"{texts[0]:<26}" + "".join(f"{text:>9}" for text in texts[1:]), flush=True)


def checked(batch: Batch) -> bool:
    """Whether the kernel is right at this point; says so where it isn't."""
    error = check(batch)
    if error > LIMIT[batch.point.dtype]:
        print(f"NOT TIMED: {batch.point} has an error of {error:.2e}", flush=True)
        return False
    return True


def timed(batch: Batch, bandwidth: float) -> Row:
    """Microseconds of a point, in the four ways."""
    warm, copies = batch.call(), len(batch.tables)
    row = dict(replay=seconds(warm), chain=seconds(*[warm] * 10))
    row["cold"] = seconds(*[batch.call(i % copies) for i in range(max(copies, 2))])
    row["plan"] = seconds(batch.call_with_plan()) - row["replay"]
    return {name: value * 1e6 for name, value in row.items()} | dict(floor=batch.point.bytes / bandwidth * 1e6)


def grid(report: Row, wanted: Wanted) -> list[Row]:
    """Every recorded point: batch x context x query tokens, bf16, 32 / 8 heads of 128, blocks of 16."""
    bandwidth, pool, rows = report["copy_gb_s"] * 1e9, Pool(), []
    room = max(batch * length for batch, length in GRID)
    show(
        "batch x context, queries", "floor", "replay", "chain", "cold", "plan", "%copy", "FA3 rec", "/FA3", "chain/FA3"
    )
    for (batch, length), q_len in ((point, q) for point in GRID for q in QUERIES):
        name = f"{batch} x {length}, {q_len}"
        if wanted.points not in name:
            continue
        made = make_batch(uniform(batch, length, q_len), pool, room)
        if not checked(made):
            continue
        row = dict(B=batch, L=length, Q=q_len) | timed(made, bandwidth)
        fa3 = recorded(batch, length, q_len)["fa3"] * 1e3
        scale = report["copy_gb_s"] / RECORDED["copy_gb_s"]
        row |= dict(share=row["floor"] / row["chain"], fa3=fa3, ratio=row["replay"] * scale / fa3)
        row["chain_ratio"] = row["chain"] * scale / fa3
        times = (row[name] for name in ("floor", "replay", "chain", "cold", "plan"))
        show(name, *times, 100 * row["share"], fa3, row["ratio"], row["chain_ratio"])
        if wanted.peers:
            row["peers"] = _peers(made)
        rows.append(row)
    if rows:
        for name in ("ratio", "chain_ratio"):
            worst = max(rows, key=lambda row: row[name])
            mean = math.exp(sum(math.log(row[name]) for row in rows) / len(rows))
            print(
                f"{name}: geometric mean {mean:.3f}, worst {worst[name]:.3f} at {worst['B']} x {worst['L']}, {worst['Q']}"
            )
    return rows


def _peers(batch: Batch) -> Row:
    """Microseconds (replay, and chain) of each peer that can be had, the reason of each that can't."""
    found: Row = {}
    for name, call in peers(batch):
        try:
            found[name] = call if isinstance(call, str) else [1e6 * seconds(call), 1e6 * seconds(*[call] * 10)]
        except RuntimeError as error:  # what can't be captured in a graph can't be timed here
            found[name] = f"not captured: {error}".splitlines()[0][:100]
    print("    " + ", ".join(f"{n} {[round(x, 1) for x in v] if isinstance(v, list) else v}" for n, v in found.items()))
    return found


def variants(report: Row, wanted: Wanted) -> list[Row]:
    """Block sizes, head groups, head dims, skewed lengths, blocks in order, fp8, and the invariant mode, beside the usual."""
    bandwidth, pool, rows = report["copy_gb_s"] * 1e9, Pool(), []
    show("variant", "floor", "replay", "chain", "cold", "plan", "%copy", "x usual")
    for shape, changes in variant_points():
        usual = 0.0
        for i, (change, point) in enumerate(changes.items()):
            name = f"{shape} {change}"
            if wanted.points not in name and (i or not any(wanted.points in f"{shape} {c}" for c in changes)):
                continue  # the usual stays where another of its shape does
            made = make_batch(point, pool)
            if not checked(made):
                continue
            row = dict(name=name) | timed(made, bandwidth)
            row["share"] = row["floor"] / row["chain"]
            usual = usual or row["share"]
            row["relative"] = usual / row["share"]  # of the time per byte
            times = (row[n] for n in ("floor", "replay", "chain", "cold", "plan"))
            show(row["name"], *times, 100 * row["share"], row["relative"])
            rows.append(row)
    return rows


def variant_points() -> list[tuple[str, dict[str, Point]]]:
    """The first of each group is what the others are compared with, by their share of the bandwidth."""
    groups = []
    for batch, length, q_len in ((8, 8192, 4), (32, 4096, 4)):
        usual = uniform(batch, length, q_len)
        points = {"usual": usual, "blocks in order": replace(usual, in_order=True)}
        points |= {f"block size {n}": replace(usual, page=n) for n in (1, 3, 64, 256)}
        points |= {f"group {n}": replace(usual, heads=(8 * n, 8)) for n in (1, 7, 8)}
        points |= {f"head dim {n}": replace(usual, dim=n) for n in (64, 80, 256)}
        points |= {"head dim 64, twice": replace(usual, dim=64, lengths=2 * usual.lengths)}  # of the usual bytes
        points |= {"fp8 KV": replace(usual, kv_dtype=torch.float8_e4m3fn)}
        groups.append((f"{batch} x {length}, {q_len}", points))
    for q_len in (1, 5, 16):
        usual = uniform(8, 8192, q_len)
        points = {"usual": usual} | {f"split_size {n}": replace(usual, split_size=n) for n in (512, 2048)}
        groups.append((f"8 x 8192, {q_len}", points))
    skewed = {f"one 64k among 60, {q}": Point((65536, *[512] * 60), q) for q in (1, 4)}
    return [*groups, ("", skewed)]


PREFILL = [(q, past) for q in (512, 2048, 8192) for past in (0, 8192, 65536)]


def prefill(report: Row, wanted: Wanted) -> list[Row]:
    """Chunks of a prompt over cached tokens: TFLOP/s, and their share of the measured matmul rate."""
    pool, rows, rate = Pool(), [], report["matmul_tflop_s"]
    show("chunk over cached", "us", "TFLOP/s", "%matmul", "plan", "sdpa us")
    for q_len, past in PREFILL:
        made = make_batch(Point((past + q_len,), q_len), pool, 2 * 73728)
        if not checked(made):
            continue
        call = made.call()
        once = seconds(*[call] * 3)
        plan = seconds(made.call_with_plan()) - seconds(call)
        flop = 4 * 32 * 128 * q_len * (past + (q_len + 1) / 2)
        row = dict(q_len=q_len, past=past, us=once * 1e6, tflop_s=flop / once / 1e12, plan=plan * 1e6)
        row |= dict(share=row["tflop_s"] / rate, sdpa=_sdpa_prefill(made))
        show(f"{q_len} over {past}", row["us"], row["tflop_s"], 100 * row["share"], row["plan"], row["sdpa"])
        if wanted.peers:
            row["peers"] = _peers(made)
        rows.append(row)
    return rows


def _sdpa_prefill(batch: Batch) -> float:
    """Microseconds of PyTorch's attention on contiguous KV, keys repeated for each group beforehand."""
    q, k, v = contiguous(batch)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = causal_lower_right(q.shape[2], k.shape[2])
    attend = torch.nn.functional.scaled_dot_product_attention
    return 1e6 * seconds(lambda: attend(q, k, v, attn_mask=bias))


def store(report: Row, wanted: Wanted) -> list[Row]:
    """store_kv of prompts and of a step's tokens, over layers and into fp8; move_kv."""
    bandwidth, rows = report["copy_gb_s"] * 1e9, []
    show("store", "floor", "us", "%copy")
    for name, layers, tokens, dtype in (
        ("8192 tokens", 1, 8192, torch.bfloat16),
        ("65536 tokens", 1, 65536, torch.bfloat16),
        ("65536 tokens, fp8", 1, 65536, torch.float8_e4m3fn),
        ("5 tokens", 1, 5, torch.bfloat16),
        ("320 tokens", 1, 320, torch.bfloat16),
        ("5 tokens, 16 layers", 16, 5, torch.bfloat16),
        ("2048 tokens, 16 layers", 16, 2048, torch.bfloat16),
    ):
        k, v = torch.randn(2, layers, tokens, 8, 128, dtype=torch.bfloat16, device="cuda")
        blocks = tokens // 16 + 2
        caches = [
            torch.zeros(layers, blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda").to(dtype) for _ in range(2)
        ]
        slots = torch.randperm(blocks, device="cuda")[:, None] * 16 + torch.arange(16, device="cuda")
        slots = slots.flatten()[:tokens].contiguous()
        store_kv(k, v, *caches, slots)
        got = caches[0].flatten(1, 2)[:, slots]
        if not torch.equal(got.view(torch.uint8), k.to(dtype).view(torch.uint8)):
            print(f"NOT TIMED: store of {name} is wrong")
            continue
        moved = k.nbytes + v.nbytes + 2 * got.nbytes
        rows.append(
            _row(name, lambda k=k, v=v, caches=caches, slots=slots: store_kv(k, v, *caches, slots), moved, bandwidth)
        )
    cache = torch.randn(4096, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    source = torch.randperm(65536, device="cuda")[: 64 * 8].view(64, 8)
    call = lambda: move_kv(cache, cache, source, source.flip(1))  # noqa: E731
    rows.append(_row("move_kv, 64 rows of 8", call, 4 * source.numel() * 8 * 128 * 2, bandwidth))
    return rows


def _row(name: str, call: Callable[[], object], moved: int, bandwidth: float) -> Row:
    row = dict(name=name, floor=moved / bandwidth * 1e6, us=seconds(*[call] * 10) * 1e6)
    row["share"] = row["floor"] / row["us"]
    show(name, row["floor"], row["us"], 100 * row["share"])
    return row


def sample_parameters(rows: int, **changes: float) -> Sampling:
    """The same parameters for all rows, with seeds of their own."""
    usual = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) | changes
    types = dict(temperature=torch.float32, top_k=torch.int32, top_p=torch.float32, min_p=torch.float32)
    columns = {n: torch.full((rows,), v, dtype=types[n], device="cuda") for n, v in usual.items()}
    return Sampling(**columns, seed=torch.arange(rows, device="cuda"))


def sample_section(report: Row, wanted: Wanted) -> list[Row]:
    """Drawing from [64 x 5, 128k] bf16 logits; accepting and looking up for 128 rows."""
    bandwidth, rows, count, vocab = report["copy_gb_s"] * 1e9, [], 320, 128256
    logits = (3 * torch.randn(count, vocab, device="cuda")).bfloat16()
    positions = torch.arange(count, device="cuda")
    show("sample, 320 x 128256", "one pass", "us", "%copy")
    for name, changes, switches in (
        ("greedy", dict(temperature=0.0), dict(noise=False, filters=False)),
        ("noise", {}, dict(filters=False)),
        ("top-k 50, top-p 0.9", dict(top_k=50, top_p=0.9), {}),
        ("top-p 0.95", dict(top_p=0.95), {}),
        ("top-k, top-p, min-p", dict(top_k=200, top_p=0.95, min_p=0.02, temperature=0.8), {}),
    ):
        given = sample_parameters(count, **changes)
        few = [x[:4].cpu() for x in given]
        want = sample(logits[:4].cpu(), positions[:4].cpu(), Sampling(*few), **switches)
        if not torch.equal(sample(logits, positions, given, **switches)[:4].cpu(), want):
            print(f"NOT TIMED: {name} draws other tokens than the twin")
            continue
        call = lambda given=given, switches=switches: sample(logits, positions, given, **switches)  # noqa: E731
        rows.append(_row(name, call, logits.nbytes, bandwidth))
    return rows + _look_ups(bandwidth)


def _look_ups(bandwidth: float) -> list[Row]:
    history = torch.randint(0, 50, (128, 2049), dtype=torch.int32, device="cuda")
    lengths = torch.full((128,), 2000, device="cuda")
    drafts = torch.randint(0, 50, (128, 4), device="cuda")
    bounds = torch.arange(129, dtype=torch.int32, device="cuda") * 5
    tokens = torch.randint(0, 50, (640,), device="cuda")
    stops, running = torch.full((128, 2), -1, device="cuda"), torch.ones(128, dtype=torch.bool, device="cuda")
    counts = torch.full((128,), 4, device="cuda")
    calls = {
        "match, 128 x 2000": (lambda: match(history, lengths, k=4), history.nbytes),
        "accept, 128 x 4": (lambda: accept(tokens, drafts, counts, bounds, stops, running), tokens.nbytes),
    }
    return [_row(name, call, moved, bandwidth) for name, (call, moved) in calls.items()]


SECTIONS: dict[str, Callable[[Row, bool], list[Row]]] = dict(
    grid=grid, variants=variants, prefill=prefill, store=store, sample=sample_section
)
