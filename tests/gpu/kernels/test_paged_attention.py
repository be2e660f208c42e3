"""Paged attention on a GPU: the CPU tests' cases natively and with the shipped configurations, and what only a GPU has."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels import AttentionPlan, launch, paged_attention, plan_attention
from specdec.kernels.attention_kernel import attention_kernel, reduce_kernel
from specdec.kernels.config import CROWDED, FP8, TABLES, Config
from specdec.kernels.options import Options
from specdec.kernels.plan_kernel import plan_kernel
from tests.kernels.attention_cases import DTYPES, FAULTS, FP8_CASES, MATRIX, fp8_case, matrix_case, matrix_id
from tests.kernels.attention_oracle import (
    INF,
    NAN,
    WILD,
    Case,
    attention_fp64,
    make_case,
    relative_error,
    run_kernel,
)

# Outputs and the weights of the second product are rounded to 16 bits; fp32 products run in full precision.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}


def to_gpu(tensor: Tensor) -> Tensor:
    """A copy with the same strides, NaN (or 1s) between its elements."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 1
    if tensor.is_floating_point() and tensor.element_size() > 1:
        storage = torch.full((extent,), NAN, dtype=tensor.dtype, device="cuda")
    else:
        storage = torch.ones(extent, dtype=torch.uint8, device="cuda").to(tensor.dtype)
    return storage.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def on_gpu(case: Case) -> Case:
    options = {k: to_gpu(v) if isinstance(v, Tensor) else v for k, v in case.options.items()}
    tensors = (case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    return Case(*(to_gpu(t) for t in tensors), options)


def check(want: tuple[Tensor, Tensor], out: Tensor, lse: Tensor | None) -> None:
    out, tolerance = out.cpu(), TOLERANCE[out.dtype]
    assert relative_error(out, want[0]) < tolerance
    if lse is not None:
        lse, empty = lse.cpu(), want[1] == -INF
        assert torch.equal(lse == -INF, empty)
        assert (out[empty] == 0).all()
        torch.testing.assert_close(lse[~empty].double(), want[1][~empty], rtol=1e-4, atol=1e-4)


def shipped(case: Case, plan: AttentionPlan | None = None) -> tuple[Tensor, Tensor]:
    """The public call with the configuration that ships, into poisoned outputs."""
    out = torch.full((*case.q.shape[:2], case.v_cache.shape[-1]), NAN, dtype=case.q.dtype, device="cuda")
    return paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords, out=out, plan=plan, return_lse=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", MATRIX, ids=matrix_id)
def test_matrix(row: dict[str, Any], dtype: str) -> None:
    case = matrix_case(row, kv_heads=2, dtype=DTYPES[dtype])
    check(attention_fp64(case), *shipped(on_gpu(case)))


@pytest.mark.parametrize("name", FAULTS)
def test_reported_faults(name: str) -> None:
    case = FAULTS[name]()
    check(attention_fp64(case), *shipped(on_gpu(case)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_caches(name: str, dtype: str) -> None:
    case = FP8_CASES[name](DTYPES[dtype])
    check(attention_fp64(case), *shipped(on_gpu(case)))


@pytest.mark.parametrize("dim, config", [(dim, config) for dim in FP8 for config in dict.fromkeys(FP8[dim])], ids=str)
@pytest.mark.parametrize("split_size", [None, 256])
def test_fp8_configurations(dim: int, config: Config, split_size: int | None) -> None:
    case = fp8_case([16, 1, 5], [3_000, 517, 1_200], torch.bfloat16, heads=(8, 2), dims=(dim, dim))
    config = config._replace(fused=config.fused and not split_size)
    check(attention_fp64(case), *run_kernel(on_gpu(case), config, split_size=split_size))


LONG = {
    "one long": ([1], [20_000], (32, 8), {}),
    "four on a long one": ([4], [9_999], (32, 8), {}),
    "eight, sixty-four rows": ([16, 16], [4_097, 3_000], (8, 2), {}),
    "skewed": ([5] * 20, [7_000] + [50] * 19, (8, 2), {}),
    "prompt": ([700, 1, 300], [700, 2_000, 1_500], (8, 2), {}),
    "prompt and window": ([700, 1, 300], [700, 2_000, 1_500], (8, 2), dict(window=256)),
    "window": ([3] * 8, [5_000] * 8, (8, 2), dict(window=1_024)),
    "sinks": ([2] * 3, [5_000, 1, 33], (8, 2), dict(sinks=torch.linspace(-2, 4, 8))),
    "many": ([1] * 300, [1 + 7 * r % 400 for r in range(300)], (4, 4), {}),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", LONG)
def test_lengths_that_split(name: str, dtype: str) -> None:
    q_lens, kv_lens, heads, options = LONG[name]
    dims = (128, 128) if dtype == "bf16" else (64, 64)
    case = make_case(q_lens, kv_lens, heads=heads, dims=dims, dtype=DTYPES[dtype], padding=2, **options)
    check(attention_fp64(case), *shipped(on_gpu(case)))


SPLITTING = [dims[:2] for dims in TABLES["large"].values()]


@pytest.mark.parametrize("config", dict.fromkeys(itertools.chain(*SPLITTING, *CROWDED.values())), ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_either_reduction(config: Any, fused: bool) -> None:
    case = make_case([4, 1], [3_000, 517], heads=(8, 2), dtype=torch.bfloat16)
    check(attention_fp64(case), *run_kernel(on_gpu(case), config._replace(fused=fused)))


def test_repeated_calls_are_bitwise_equal() -> None:
    """aiter#5090: one plan for 300 layers; a counter left over from the layer before, or a race of splits, would show."""
    case = on_gpu(make_case([4, 1, 2], [9_000, 517, 3_000], heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16))
    plan = plan_attention(**case.lengths)
    first, first_lse = shipped(case, plan)
    for _ in range(300):
        out, lse = shipped(case, plan)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


REPLAYS = [
    ([3, 1, 2, 4], [100, 40, 900, 7]),
    ([1, 1, 1, 1], [3_000, 1, 16, 17]),
    ([4, 4, 4, 4], [4, 3, 2_000, 0]),
    ([0, 0, 0, 0], [50, 0, 3, 900]),
    ([0, 2, 0, 1], [0, 5_000, 9, 12]),
]


@pytest.mark.parametrize("options", [{}, dict(window=100), dict(split_size=256)], ids=str)
def test_graph_replays_with_other_lengths(options: dict[str, Any]) -> None:
    """vllm#48076, #37442, #57156, #20301, sglang#22800, #26019, #23500, flashinfer#187, #411, #4002, #4430: the plan is part of
    the graph, without a copy to the host, and tokens that no row owns come out as 0.
    """
    options, split_size = dict(options), options.get("split_size")
    options.pop("split_size", None)
    shape = dict(heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16)
    cases = [make_case(*lens, **shape, seed=i, **options) for i, lens in enumerate(REPLAYS)]
    tokens = 16
    blocks = max(case.k_cache.shape[0] for case in cases)
    width = max(case.block_table.shape[1] for case in cases)
    q = torch.zeros(tokens, 8, 128, dtype=torch.bfloat16, device="cuda")
    caches = [torch.zeros(blocks, 16, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    table = torch.full((4, width), WILD, dtype=torch.int32, device="cuda")
    seq_lens, bounds = (
        torch.zeros(4, dtype=torch.int32, device="cuda"),
        torch.zeros(5, dtype=torch.int32, device="cuda"),
    )
    out = torch.zeros_like(q)

    def forward() -> Tensor:
        lengths = dict(block_table=table, seq_lens=seq_lens, cu_seqlens_q=bounds, max_seqlen_q=4)
        plan = plan_attention(**lengths, split_size=split_size)
        return paged_attention(q, *caches, **lengths, **options, scale=128**-0.5, plan=plan, out=out, return_lse=True)[
            1
        ]

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse = forward()
    for case in cases:
        owned = case.q.shape[0]
        q[:owned], q[owned:] = case.q.cuda(), NAN
        for cache, source in zip(caches, (case.k_cache, case.v_cache), strict=True):
            cache.fill_(NAN)[: source.shape[0]] = source.cuda()
        table.fill_(WILD)[:, : case.block_table.shape[1]] = case.block_table.cuda()
        seq_lens.copy_(case.seq_lens)
        bounds.copy_(case.cu_seqlens_q)
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        want, want_lse = attention_fp64(case)
        assert (out[owned:] == 0).all() and (lse[owned:] == -INF).all()
        if owned:
            check((want, want_lse), out[:owned], lse[:owned])


def test_pool_past_2_31_elements() -> None:
    """flash-attention#772, vllm#47671, #50427: blocks whose first element's number is no int32."""
    case = make_case([3, 1], [100, 33], heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16)
    far = 2**31 // (16 * 2 * 128) + 7
    want, gpu = attention_fp64(case), on_gpu(case)
    for name in ("k_cache", "v_cache"):
        small = getattr(gpu, name)
        large = torch.empty(far + len(small), 16, 2, 128, dtype=torch.bfloat16, device="cuda")
        large[far:] = small
        setattr(gpu, name, large)
    gpu.block_table = torch.where(gpu.block_table == WILD, WILD, gpu.block_table + far)
    check(want, *shipped(gpu))


def test_lengths_compile_nothing() -> None:
    """vllm#48739, #48650: once few keys and many have been seen, no batch, length or table width compiles anything."""
    kernels = (attention_kernel, reduce_kernel, plan_kernel)
    seen = [(3, 2, 1_000), (1, 1, 1)]
    for seed, (rows, new, keys) in enumerate([*seen, (16, 1, 16), (17, 3, 500), (1, 4, 9_000), (60, 2, 33)]):
        case = random_case_on_gpu(
            [min(new, keys)] * rows, [keys] * rows, (8, 2), (128, 128), torch.bfloat16, seed, None
        )
        for max_seqlen_q in (new, 16):  # 16-row tiles, then 64-row ones
            lengths = case.lengths | dict(max_seqlen_q=max_seqlen_q)
            paged_attention(case.q, case.k_cache, case.v_cache, **lengths, scale=0.1)
        count = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
        if seed < len(seen):
            first = count
        assert count == first, (rows, new, keys)


@pytest.mark.parametrize("scale", [0.1, 0.37, 3.0])
def test_a_tile_that_a_row_sees_nothing_of_changes_no_bit(scale: float) -> None:
    """Of two queries, the second alone sees the first key of the second tile: the first comes out as it does alone.

    One of 5,000 sequences differed in an ulp while the sums so far were scaled by exp2 of a rounding error, not of 0. The
    interpreter's fused multiply-add is not fused, so that only a GPU can tell.
    """
    shape = dict(heads=(16, 1), dims=(128, 128), dtype=torch.bfloat16, scale=scale)
    two, one = on_gpu(make_case([2], [65], **shape)), on_gpu(make_case([2], [65], **shape))
    bounds = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    one.q, one.seq_lens, one.cu_seqlens_q = one.q[:1], one.seq_lens - 1, bounds
    config = Config(64, 64, 4, 3, 1, False)
    for alone, beside in zip(
        run_kernel(one, config, split_size=128), run_kernel(two, config, split_size=128), strict=True
    ):
        assert torch.equal(alone[0], beside[0])


BATCHES = 1_500
INVARIANT = {
    "bf16, head dim 128": ("bf16", (128, 128), 4, None),
    "fp16, head dim 64, window": ("fp16", (64, 64), 8, 77),
    "bf16, head dim 80": ("bf16", (80, 80), 3, None),
}


@pytest.mark.parametrize("name", INVARIANT)
def test_invariant_mode_is_bitwise(name: str) -> None:
    """vllm#54506, #17476, #26130. 1,500 random batches of up to 6 sequences of 1 to 16 new tokens: any number of each one's
    last tokens, alone, come out with the very bits that they have in the batch. Nothing is copied to the host before the end.
    """
    dtype, dims, group, window = INVARIANT[name]
    rng, split_size = random.Random(7), 256
    tried, differs = [], []
    for seed in range(BATCHES):
        rows = rng.randint(1, 6)
        kv_lens = [rng.choice([rng.randint(1, 40), rng.randint(1, 700), rng.randint(1, 3_000)]) for _ in range(rows)]
        q_lens = [min(rng.randint(1, 16), n) for n in kv_lens]
        case = random_case_on_gpu(q_lens, kv_lens, (2 * group, 2), dims, DTYPES[dtype], seed, window)
        whole = invariant(case, split_size)
        bounds = [0, *itertools.accumulate(q_lens)]
        for r in range(rows):
            new, stop = rng.randint(1, q_lens[r]), bounds[r + 1]
            cu = torch.tensor([0, new], dtype=torch.int32).cuda(non_blocking=True)
            lengths = case.block_table[r : r + 1], case.seq_lens[r : r + 1], cu
            alone = Case(case.q[stop - new : stop], case.k_cache, case.v_cache, *lengths, case.options)
            differs.append(
                (invariant(alone, split_size, new) != whole[stop - new : stop]).any()
            )  # NaN differs from itself
            tried.append((seed, r, new, q_lens, kv_lens))
    assert len(tried) > 2 * BATCHES
    assert [case for case, bad in zip(tried, torch.stack(differs).tolist(), strict=True) if bad] == []


def random_case_on_gpu(
    q_lens: list[int], kv_lens: list[int], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, seed: int,
    window: int | None,
) -> Case:  # fmt: skip
    """As make_case, drawn on the GPU: a pool without poison, for comparing bits."""
    torch.manual_seed(seed)
    counts = [-(-n // 16) for n in kv_lens]
    table = torch.zeros(len(kv_lens), max(counts), dtype=torch.int32)
    ids = torch.randperm(sum(counts), dtype=torch.int32)
    for r, (first, n) in enumerate(zip(itertools.accumulate([0, *counts]), counts, strict=False)):
        table[r, :n] = ids[first : first + n]
    caches = [torch.randn(sum(counts), 16, heads[1], d, device="cuda", dtype=dtype) for d in dims]
    q = torch.randn(sum(q_lens), heads[0], dims[0], device="cuda", dtype=dtype)
    cu = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
    lengths = table.cuda(), torch.tensor(kv_lens, dtype=torch.int32).cuda(), cu.cuda()
    return Case(q, *caches, *lengths, dict(window=window))


def invariant(case: Case, split_size: int, max_seqlen_q: int = 16) -> Tensor:
    lengths = dict(block_table=case.block_table, seq_lens=case.seq_lens, cu_seqlens_q=case.cu_seqlens_q)
    plan = plan_attention(**lengths, max_seqlen_q=max_seqlen_q, split_size=split_size)
    out = torch.full_like(case.q, NAN)
    options = Options(case.q.shape[-1] ** -0.5, window=case.options["window"])
    launch.attend(case.q, case.k_cache, case.v_cache, plan, options, out, None)
    return out
