"""Paged attention against fp64: the torch twin, and the Triton kernels in the interpreter, on odd sizes and poisoned memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels import launch, merge_states, paged_attention, plan_attention
from specdec.kernels.attention_kernel import unpack
from specdec.kernels.backend import interpreted
from specdec.kernels.config import Config
from specdec.kernels.options import Options
from specdec.kernels.plan_kernel import FIRST, LAST, PAIR, PAIR_SLOT, PAIR_SPLITS, Q_TILE, ROW, SLOT
from tests.kernels.attention_cases import FAULTS, FP8, FP8_CASES, MATRIX, matrix_case, matrix_id
from tests.kernels.attention_oracle import (
    INF,
    NAN,
    Case,
    attention_fp64,
    make_case,
    relative_error,
    run_kernel,
    tree_of,
)

FUSED = Config(block_m=16, block_n=32, warps=4, stages=3, workers=2, fused=True)
TWO_KERNELS = Config(block_m=16, block_n=16, warps=4, stages=3, workers=4, fused=False)
TALL = Config(block_m=64, block_n=32, warps=4, stages=3, workers=1, fused=False)
CONFIGS = {"fused": FUSED, "two-kernels": TWO_KERNELS, "tall": TALL}

# ||error|| / ||output||: the rounding of the output (the interpreter truncates to bf16), fp32 for all that comes before it.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def run_twin(case: Case, lse: bool = True) -> tuple[Tensor, Tensor | None]:
    out = torch.full((*case.q.shape[:2], case.v_cache.shape[-1]), NAN, dtype=case.q.dtype)
    got = paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords, out=out, return_lse=lse)
    return (out, got[1]) if lse else (out, None)


def config_of(case: Case, index: int = 0) -> Config:
    """One of CONFIGS in turn; the tall tile where query rows are many, as in the shipped table (and for speed)."""
    rows = case.lengths["max_seqlen_q"] * case.q.shape[1] // case.k_cache.shape[2]
    return TALL if rows > 64 else list(CONFIGS.values())[index % 3]


def check(want: tuple[Tensor, Tensor], out: Tensor, lse: Tensor | None) -> None:
    assert relative_error(out, want[0]) < TOLERANCE[out.dtype]
    if lse is not None:
        empty = want[1] == -INF
        assert torch.equal(lse == -INF, empty)
        assert (out[empty] == 0).all()
        torch.testing.assert_close(lse[~empty].double(), want[1][~empty], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("row", MATRIX, ids=matrix_id)
def test_twin(row: dict[str, Any]) -> None:
    case = matrix_case(row, kv_heads=2 if row["group"] < 8 else 1)
    want = attention_fp64(case)
    check(want, *run_twin(case))
    check(want, *run_twin(case, lse=False))


@pytest.mark.interpreter
@pytest.mark.parametrize("index", range(len(MATRIX)), ids=lambda i: matrix_id(MATRIX[i]))
def test_kernel(index: int) -> None:
    case = matrix_case(MATRIX[index])
    check(attention_fp64(case), *run_kernel(case, config_of(case, index)))


@pytest.mark.parametrize("name", FAULTS)
def test_reported_faults_twin(name: str) -> None:
    case = FAULTS[name]()
    want = attention_fp64(case)
    check(want, *run_twin(case))
    check(want, *run_twin(case, lse=False))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", FAULTS)
def test_reported_faults_kernel(name: str) -> None:
    case = FAULTS[name]()
    check(attention_fp64(case), *run_kernel(case, config_of(case)))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_caches(name: str) -> None:
    case = FP8_CASES[name](torch.float16)
    want = attention_fp64(case)
    check(want, *run_twin(case))
    check(want, *run_kernel(case, config_of(case, len(name))))


@triton.jit
def unpack_kernel(words, low, high, N: tl.constexpr):
    i = tl.arange(0, N)
    even, odd = unpack(tl.load(words + i), True)
    tl.store(low + i, even)
    tl.store(high + i, odd)


@pytest.mark.interpreter
def test_every_fp8_pair_is_unpacked() -> None:
    """NaN and subnormals too."""
    pairs = torch.arange(2**16).to(torch.uint16)
    low, high = torch.empty(2, 2**16, dtype=torch.float16)
    unpack_kernel[(1,)](pairs.view(torch.int16), low, high, N=2**16)
    want = pairs.view(torch.uint8).view(FP8).half().view(-1, 2)
    torch.testing.assert_close(torch.stack([low, high], 1), want, rtol=0, atol=0, equal_nan=True)


def permuted(case: Case, order: list[int]) -> tuple[Case, Tensor]:
    """The case with its sequences in another order, and where each of its rows of q was."""
    bounds = case.cu_seqlens_q.tolist()
    rows = torch.cat([torch.arange(bounds[r], bounds[r + 1]) for r in order])
    lens = [bounds[r + 1] - bounds[r] for r in order]
    options = {k: v[rows] if k == "tree_mask" else v for k, v in case.options.items()}
    cu = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    caches = (case.q[rows], case.k_cache, case.v_cache)
    return Case(*caches, case.block_table[order], case.seq_lens[order], cu, options), rows


@pytest.mark.interpreter
@pytest.mark.parametrize("workers", [1, 3, 64])
@pytest.mark.parametrize("fused", [True, False])
def test_splits_change_rounding_only(workers: int, fused: bool) -> None:
    case = make_case([5, 1, 0, 2], [131, 17, 5, 64], sinks=torch.tensor([0.5, -1, 2, 0]))
    check(attention_fp64(case), *run_kernel(case, Config(16, 16, 4, 3, workers, fused)))


@pytest.mark.interpreter
def test_a_plan_serves_layers_of_other_windows_and_shapes() -> None:
    case = make_case([3, 2], [90, 41])
    other = make_case([3, 2], [90, 41], heads=(6, 2), dims=(32, 32))
    other.block_table, other.k_cache, other.v_cache = case.block_table, other.k_cache, other.v_cache
    plan = plan_attention(**case.lengths)
    for window in (None, 7, None, 40):
        case.options["window"] = window
        check(attention_fp64(case), *run_kernel(case, FUSED, plan=plan))
    # The other layer's KV lies where its own table, of equal lengths and seed, put it.
    check(attention_fp64(other), *run_kernel(other, FUSED, plan=plan))


@pytest.mark.interpreter
@pytest.mark.parametrize("options", [{}, dict(window=21)], ids=["plain", "window"])
def test_invariant_mode_ignores_the_batch(options: dict[str, Any]) -> None:
    """tokenspeed#904: bitwise. That 1 to 16 new tokens give the same bits too is for tests/gpu: a CPU's depend on the row."""
    case = make_case([16, 3, 1], [300, 140, 33], **options)
    whole, lse = run_kernel(case, TALL, split_size=128)
    check(attention_fp64(case), whole, lse)
    swapped, rows = permuted(case, [2, 0, 1])
    assert torch.equal(run_kernel(swapped, TALL, split_size=128)[0], whole[rows])
    alone, rows = permuted(case, [1])
    assert torch.equal(run_kernel(alone, TALL, split_size=128)[0], whole[rows])


@pytest.mark.parametrize("run", [run_twin, pytest.param(lambda c: run_kernel(c, FUSED), marks=pytest.mark.interpreter)])
class TestEquivalences:
    """What must come out alike, by twin and by kernel."""

    def test_chain_tree_is_causal(self, run: Any) -> None:
        case = make_case([6, 1], [40, 20])
        plain = run(case)
        case.options["tree_mask"] = torch.cat([tree_of([-1, 0, 1, 2, 3, 4]), tree_of([-1])])
        torch.testing.assert_close(run(case), plain, rtol=1e-6, atol=1e-6)

    def test_wide_words(self, run: Any) -> None:
        """Two words of bits, of which short sequences use one."""
        case = make_case([70, 3], [75, 20], heads=(1, 1))
        low = tree_of([*range(-1, 63)])
        chain = torch.tensor([[int(low[min(i, 63)]), (1 << max(i - 63, 0)) - 1] for i in range(70)])
        plain = run(case)
        bits = torch.cat([chain, torch.stack([tree_of([-1, 0, 1]), torch.zeros(3, dtype=torch.int64)], 1)])
        case.options["tree_mask"] = bits
        torch.testing.assert_close(run(case), plain, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("window", [39, 40, 41])
    def test_window_of_the_whole_context(self, run: Any, window: int) -> None:
        """A window of as many keys as there are hides nothing; one less hides the first key of the last query."""
        case = make_case([3], [40])
        plain = run(case)[0]
        case.options["window"] = window
        assert torch.equal(run(case)[0][:2], plain[:2]) or torch.allclose(run(case)[0][:2], plain[:2], atol=1e-6)
        assert torch.allclose(run(case)[0][2], plain[2], atol=1e-6) == (window >= 40)

    def test_order_of_the_batch(self, run: Any) -> None:
        case = make_case([5, 1, 0, 3], [70, 20, 9, 33])
        out, _ = run(case)
        swapped, rows = permuted(case, [3, 2, 0, 1])
        torch.testing.assert_close(run(swapped)[0], out[rows], rtol=1e-6, atol=1e-6)

    def test_no_sequences(self, run: Any) -> None:
        case = make_case([], [], padding=3)
        out, lse = run(case)
        assert (out == 0).all() and (lse == -INF).all()

    def test_no_lse(self, run: Any) -> None:
        case = make_case([2, 1], [33, 0], padding=1)
        out, _ = run(case)
        assert out[3:].eq(0).all()


@pytest.mark.interpreter
def test_int64_addresses() -> None:
    """flash-attention#772, vllm#47671, tokenspeed#501: a block that starts past 2^31 elements (never touched, but for one)."""
    case = make_case([2], [16], heads=(1, 1), dtype=torch.float16)
    far = 2**31 // (16 * 64) + 5
    for name in ("k_cache", "v_cache"):
        small = getattr(case, name)
        large = torch.empty(far + 1, 16, 1, 64, dtype=torch.float16)
        large[far] = small[case.block_table[0, 0].item()]
        setattr(case, name, large)
    case.block_table[0, 0] = far
    check(attention_fp64(case), *run_kernel(case, FUSED))


@pytest.mark.interpreter
def test_queries_far_apart() -> None:
    """sglang#20389, tokenspeed#530: a row of q, and of the output, that starts past 2^31 elements; none between is touched."""
    case = make_case([2], [16], heads=(1, 1), dtype=torch.float16)
    want, stride = attention_fp64(case), 2**31 + 64
    q, out = (torch.empty(stride + 64, dtype=torch.float16).as_strided((2, 1, 64), (stride, 64, 1)) for _ in range(2))
    case.q = q.copy_(case.q)
    launch.attend(q, case.k_cache, case.v_cache, plan_attention(**case.lengths), Options(64**-0.5), out, None, FUSED)
    check(want, out, None)


@pytest.mark.interpreter
def test_lengths_past_the_table_are_held_to_it() -> None:
    """flash-attention#2709, #2711: what stands behind a row of the table is wild, and looking at lengths takes no sync."""
    case = make_case([2, 1], [48, 20])
    want = attention_fp64(case)
    case.block_table = case.block_table[:, :3]  # all of 48 keys' blocks, and no more
    case.seq_lens = torch.tensor([500, 20], dtype=torch.int32)
    check(want, *run_kernel(case, FUSED))


@pytest.mark.interpreter
def test_interpreted_dispatch() -> None:
    case = make_case([2, 1], [20, 9])
    with interpreted():
        got = paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords)
    torch.testing.assert_close(got, paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords))


def test_out_and_plan_are_used() -> None:
    case = make_case([2, 1], [20, 9])
    out = torch.empty_like(case.q)
    plan = plan_attention(**case.lengths)
    assert paged_attention(case.q, case.k_cache, case.v_cache, **case.keywords, out=out, plan=plan) is out
    check(attention_fp64(case), out, None)


@pytest.mark.parametrize("lens", [(30, 50), (0, 40), (40, 0), (0, 0)], ids=str)
def test_merge_of_two_halves(lens: tuple[int, int]) -> None:
    """flashinfer#4051: two empty halves give 0 and -inf, not NaN; sglang#35045, flashinfer#2113, #4547: the log is natural."""
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 4, 64), torch.randn(sum(lens), 2, 64), torch.randn(sum(lens), 2, 64)

    def attend(k: Tensor, v: Tensor) -> Case:
        n = len(k)
        pad = (0, 0, 0, 0, 0, 1)  # one slot more, so that there is a block to point at
        caches = (torch.nn.functional.pad(x, pad)[:, None] for x in (k, v))
        table = torch.arange(n + 1, dtype=torch.int32)[None]
        lengths = torch.tensor([n], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
        return Case(q, *caches, table, *lengths, dict(causal=False))

    a, b = attend(k[: lens[0]], v[: lens[0]]), attend(k[lens[0] :], v[lens[0] :])
    out, lse = merge_states(*run_twin(a), *run_twin(b))
    check(attention_fp64(attend(k, v)), out, lse)


def bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    case = make_case([2, 1], [20, 9])
    return {
        "q of two dims": (dict(q=case.q[0]), r"q: expected shape \[any, any, any\], got \[4, 64\]"),
        "int q": (dict(q=case.q.int()), "q: expected dtype torch.float32 or"),
        "head dim": (dict(q=case.q[..., :32]), r"k_cache: expected shape \[any, any, any, 32\]"),
        "heads": (dict(q=case.q[:, :3]), "multiple of 2 heads"),
        "v_cache blocks": (dict(v_cache=case.v_cache[1:]), "v_cache: expected shape"),
        "mixed caches": (dict(v_cache=case.v_cache.half()), "v_cache: expected dtype"),
        "cache dtype": (dict(k_cache=case.k_cache.half(), v_cache=case.v_cache.half()), "k_cache: expected dtype"),
        "strided k": (dict(k_cache=case.k_cache.transpose(2, 3)[:, :, :, ::1].transpose(1, 2)), "k_cache: expected"),
        "int64 table": (dict(block_table=case.block_table.long()), "block_table: expected dtype torch.int32"),
        "rows": (dict(block_table=case.block_table[:1]), r"block_table: expected shape \[2, any\]"),
        "bounds": (dict(cu_seqlens_q=case.cu_seqlens_q[:2]), r"cu_seqlens_q: expected shape \[3\]"),
        "max_seqlen_q": (dict(max_seqlen_q=-1), "max_seqlen_q: expected at least 0, got -1"),
        "scale": (dict(scale=0.0), "scale: expected a number > 0, got 0.0"),
        "window": (dict(window=0), "window: expected None or at least 1"),
        "softcap": (dict(softcap=0.0), "softcap: expected None or a number > 0"),
        "sinks": (dict(sinks=torch.zeros(3)), r"sinks: expected shape \[4\]"),
        "k_scale": (dict(k_scale=torch.ones(2)), "k_scale, v_scale: expected torch.float8_e4m3fn caches"),
        "tree rows": (dict(tree_mask=torch.ones(2, dtype=torch.int64)), r"tree_mask: expected shape \[3, any\]"),
        "tree and window": (dict(tree_mask=torch.ones(3, dtype=torch.int64), window=8), "window: expected at least 64"),
        "tree and alibi": (
            dict(tree_mask=torch.ones(3, dtype=torch.int64), alibi_slopes=torch.ones(4)),
            "alibi_slopes: expected None beside a tree_mask",
        ),
        "out": (dict(out=torch.empty(3, 4, 32)), r"out: expected shape \[3, 4, 64\]"),
        "plan": (dict(plan=plan_attention(**make_case([1], [3]).lengths)), "plan: expected one made of this"),
        "past the table": (dict(seq_lens=torch.tensor([500, 9], dtype=torch.int32)), "seq_lens: expected at most"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_refused(name: str) -> None:
    case, (changed, message) = make_case([2, 1], [20, 9]), bad_calls()[name]
    arguments = dict(q=case.q, k_cache=case.k_cache, v_cache=case.v_cache) | case.keywords | changed
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)


@pytest.mark.parametrize("size", [0, 64, 130])
def test_refused_split_size(size: int) -> None:
    with pytest.raises(ValueError, match="split_size: expected None or a multiple of 128"):
        plan_attention(**make_case([1], [3]).lengths, split_size=size)


lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 900)), min_size=1, max_size=5)


@pytest.mark.interpreter
@settings(max_examples=30, deadline=None)
@given(
    lens=lengths,
    window=st.sampled_from([None, 1, 33, 500]),
    causal=st.booleans(),
    words=st.sampled_from([0, 0, 1]),
    group=st.sampled_from([1, 3, 4]),
    kv_heads=st.sampled_from([1, 8]),
    split_size=st.sampled_from([None, None, 128]),
    workers=st.integers(1, 200),
)
def test_plan_covers_every_visible_tile_once(
    lens: list[tuple[int, int]], window: int | None, causal: bool, words: int, group: int, kv_heads: int,
    split_size: int | None, workers: int,
) -> None:  # fmt: skip
    """Of any lengths: the items of a tile of query rows follow each other without gap or overlap, and all fit the table."""
    if words and (not causal or (window or 64) < 64):
        window, causal = None, True
    q_lens, kv_lens = [n for n, _ in lens], [n for _, n in lens]
    plan = plan_attention(
        torch.zeros(len(lens), 60, dtype=torch.int32),
        torch.tensor(kv_lens, dtype=torch.int32),
        torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32),
        max(q_lens),
        split_size=split_size,
    )
    config = Config(16, 32, 4, 3, 1, True)
    shape = launch.Shape(config, sum(q_lens) + 2, kv_heads, group, 1, 64, 64, 16, window, causal, words)
    bounds = launch._bounds(plan, shape, workers)
    work = launch._fill(plan, shape, workers, bounds)
    num_items, num_pairs, padding = work.head[:3].tolist()
    items, pairs = work.items[:num_items].tolist(), work.pairs[:num_pairs].tolist()
    assert padding == sum(q_lens)
    tiles: dict[tuple[int, int], list[list[int]]] = {}
    for item in items:
        tiles.setdefault((item[ROW.value], item[Q_TILE.value]), []).append(item)
    assert set(tiles) == {(r, t) for r, n in enumerate(q_lens) for t in range(-(-n * group // 16))}
    slots: list[int] = []
    for (row, tile), parts in tiles.items():
        start, stop = visible(q_lens[row], kv_lens[row], tile, group, window, causal, words)
        runs = [(item[FIRST.value], item[LAST.value]) for item in parts if item[LAST.value] > item[FIRST.value]]
        covered = [t for run in runs for t in range(*run)]
        assert covered == list(range(start // 32, -(-stop // 32))), (row, tile, runs, start, stop)
        if split_size:  # cut at absolute positions
            assert all(first * 32 % split_size == 0 or first == start // 32 for first, _ in runs)
        if len(parts) == 1:
            assert parts[0][SLOT.value] == -1
        else:
            mine = [item[SLOT.value] for item in parts]
            pair = pairs[parts[0][PAIR.value]]
            assert mine == list(range(pair[PAIR_SLOT.value], pair[PAIR_SLOT.value] + pair[PAIR_SPLITS.value]))
            slots += mine
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= bounds[2]
    assert work.counters[:num_pairs].eq(0).all()


def visible(
    q_len: int, kv_len: int, tile: int, group: int, window: int | None, causal: bool, words: int
) -> tuple[int, int]:
    """Key positions [start, stop) that some query of a 16-row tile sees, by looking at each."""
    rows = [row // group for row in range(tile * 16, tile * 16 + 16) if row // group < q_len]
    tree = 0 < q_len <= 64 * words
    first, last = (0, q_len - 1) if tree else (rows[0], rows[-1])
    stop = min(kv_len, kv_len - q_len + last + 1) if causal else kv_len
    start = 0 if window is None else max(kv_len - q_len + first - window + 1, 0)
    return start, max(stop, 0)
