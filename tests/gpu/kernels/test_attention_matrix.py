"""Paged attention natively against fp64: dtypes, head dims, groups, block sizes, ragged queries, poisoned memory."""

import itertools
import random

import pytest
import torch
from attention_oracle import Case, attention_fp64, make_case, relative_error

from specdec.kernels import paged_attention, store_kv

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
GRID = list(
    itertools.product(
        TOLERANCE, (64, 72, 80, 96, 128, 256), (1, 3, 4, 5, 7, 8), (1, 3, 16, 64), (None, 37), (None, 20.0)
    )
)
CASES = random.Random(0).sample(GRID, 120)
SHAPES = [
    ([1, 1, 1], [700, 1, 33]),
    ([5, 5, 5], [1500, 5, 64]),
    ([0, 3, 9, 1], [0, 3, 200, 65]),
    ([16, 2], [2000, 2]),
    ([70, 1], [64, 300]),  # kv shorter than q
    ([200, 33], [900, 33]),
]


def on_gpu(case: Case) -> Case:
    moved = {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in case.options.items()}
    caches = case.k_cache.cuda(), case.v_cache.cuda()
    return Case(case.q.cuda(), *caches, case.block_table.cuda(), case.seq_lens.cuda(), case.cu_seqlens_q.cuda(), moved)


@pytest.mark.parametrize("i", range(len(CASES)))
def test_against_fp64(i):
    dtype, dim, group, block_size, window, softcap = CASES[i]
    q_lens, kv_lens = SHAPES[i % len(SHAPES)]
    options = {n: v for n, v in (("window", window), ("softcap", softcap)) if v}
    case = make_case(
        q_lens, kv_lens, heads=(2 * group, 2), dims=(dim, dim), block_size=block_size, dtype=dtype, padding=i % 3,
        seed=i, **options,
    )  # fmt: skip
    want, want_lse = attention_fp64(case)
    out, lse = paged_attention(**vars_of(on_gpu(case)), return_lse=True)
    assert relative_error(out.cpu(), want) < TOLERANCE[dtype]
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse.cpu()), finite)
    assert relative_error(lse.cpu()[finite], want_lse[finite]) < 1e-2


def vars_of(case: Case) -> dict:
    return {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache, **case.keywords}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_store_writes_its_slots_and_nothing_else(dtype):
    k = torch.randn(50, 3, 80, device="cuda").to(dtype)
    v = torch.randn(50, 3, 64, device="cuda").to(dtype)
    caches = [torch.full((9, 7, 3, d), float("nan"), device="cuda", dtype=dtype) for d in (80, 64)]
    slots = torch.randperm(63, device="cuda")[:50]
    slots[:4] = torch.tensor([-1, 63, 2**40, -5], device="cuda")
    store_kv(k, v, *caches, slots)
    for cache, x in zip(caches, (k, v), strict=True):
        flat = cache.view(63, *cache.shape[2:])
        assert torch.equal(flat[slots[4:]], x[4:])
        assert int(torch.isfinite(flat).all(-1).all(-1).sum()) == 46
