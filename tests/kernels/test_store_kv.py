"""Writing and moving KV, by twin and by kernel: every slot that nobody named keeps its poison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels import move_kv, paged_attention, store_kv
from specdec.kernels.backend import interpreted
from tests.kernels.attention_oracle import attention_fp64, empty_caches, make_case, relative_error

FP8 = torch.float8_e4m3fn


@pytest.fixture(params=["twin", pytest.param("kernel", marks=pytest.mark.interpreter)], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with interpreted() if request.param == "kernel" else nullcontext():
        yield


def flat(cache: Tensor) -> Tensor:
    """[slots, Hkv, D], a copy."""
    return cache.reshape(-1, *cache.shape[2:])


def written(cache: Tensor) -> list[int]:
    """Slots that hold something else than poison."""
    return (~flat(cache).float().isnan().all(-1).all(-1)).nonzero().flatten().tolist()


@pytest.mark.parametrize("layout", ["NHD", "HND", "KV"])
@pytest.mark.parametrize("page, heads, dims", [(1, 3, (8, 8)), (16, 2, (64, 48)), (3, 5, (80, 80)), (7, 1, (1, 20))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store(layout: str, page: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Strided inputs and caches; slots that are -1, past the end, or far past 2^31 write nothing (flash-attention#638,
    vllm#15113, transformers#46765)."""
    torch.manual_seed(0)
    k_cache, v_cache = empty_caches(40 // page + 2, page, heads, dims, dtype, layout)
    size = k_cache.shape[0] * page
    fused = torch.randn(9, heads, sum(dims) + 3).to(dtype)
    k, v = fused[..., : dims[0]], fused[..., dims[0] : sum(dims)]
    slots = torch.tensor([size - 1, 3, -1, size, 17, 2**40 + 5, 0, -(2**33), 18])
    store_kv(k, v, k_cache, v_cache, slots)
    kept = [0, 1, 4, 6, 8]
    assert written(k_cache) == written(v_cache) == sorted(slots[kept].tolist())
    assert torch.equal(flat(k_cache)[slots[kept]], k[kept])
    assert torch.equal(flat(v_cache)[slots[kept]], v[kept])


@pytest.mark.parametrize("page", [3, 16, 19])
def test_what_is_stored_is_attended(page: int) -> None:
    """vllm#47056: slots mean the same to both, whatever the block size is."""
    case = make_case([5, 1], [20, 7], block_size=page)
    want = attention_fp64(case)
    slots = []
    for row, n in zip(case.block_table, case.seq_lens.tolist(), strict=True):
        pos = torch.arange(n)
        slots.append(row[pos // page].long() * page + pos % page)
    caches = [torch.full_like(cache, torch.nan) for cache in (case.k_cache, case.v_cache)]
    slot_mapping = torch.cat(slots)
    store_kv(flat(case.k_cache)[slot_mapping], flat(case.v_cache)[slot_mapping], *caches, slot_mapping)
    assert relative_error(paged_attention(case.q, *caches, **case.keywords), want[0]) < 3e-6


@pytest.mark.parametrize("slots", [[-1, -1], [5, 4], []], ids=str)
def test_int32_slots(slots: list[int]) -> None:
    k_cache, v_cache = empty_caches(3, 4, 2, (16, 16), torch.float16, "NHD")
    k = torch.randn(len(slots), 2, 16).half()
    store_kv(k, k, k_cache, v_cache, torch.tensor(slots, dtype=torch.int32))
    assert written(k_cache) == sorted(s for s in slots if s >= 0)


@pytest.mark.parametrize("scaled", [True, False])
def test_fp8_saturates(scaled: bool) -> None:
    """A cast alone would turn 1000 into NaN or 256 in places. Numbers that fit, since the interpreter's rounding is wrong."""
    k_cache, v_cache = (x.to(FP8) for x in empty_caches(2, 4, 2, (16, 16), torch.float32, "NHD"))
    fits = torch.tensor([0, 0.25, -1.75, 3, -14, 120, -448, 2000, -5000, 224, -0.5, 2.5, -30, 56, 7, -1])
    k, v = fits.expand(3, 2, 16).contiguous(), fits.flip(0).expand(3, 2, 16).contiguous()
    scales = torch.tensor([2.0, 0.5]), torch.tensor([1.0, 4.0])
    given = dict(k_scale=scales[0], v_scale=scales[1]) if scaled else {}
    store_kv(k, v, k_cache, v_cache, torch.tensor([6, -1, 1]), **given)
    for cache, x, scale in ((k_cache, k, scales[0]), (v_cache, v, scales[1])):
        want = (x / (scale[:, None] if scaled else 1)).clamp(-448, 448)
        assert torch.equal(flat(cache.float())[torch.tensor([6, 1])], want[[0, 2]])
        assert written(cache) == [1, 6]


@pytest.mark.parametrize("layers", [1, 3])
def test_store_of_several_layers(layers: int) -> None:
    caches = [empty_caches(5, 4, 2, (16, 16), torch.float32, "NHD") for _ in range(layers)]
    k_cache, v_cache = (torch.stack(x) for x in zip(*caches, strict=True))
    k, v = torch.randn(2, layers, 3, 2, 16)
    slots = torch.tensor([19, -1, 7])
    store_kv(k, v, k_cache, v_cache, slots)
    for layer in range(layers):
        assert written(k_cache[layer]) == written(v_cache[layer]) == [7, 19]
        assert torch.equal(flat(k_cache[layer])[[19, 7]], k[layer][[0, 2]])
        assert torch.equal(flat(v_cache[layer])[[19, 7]], v[layer][[0, 2]])


@pytest.mark.parametrize("layout", ["NHD", "HND", "KV"])
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_move(layout: str, dtype: torch.dtype) -> None:
    """Paths of two trees: chains of moves over one another, what stays, and pairs that lie outside."""
    k_cache, v_cache = (x.to(dtype) for x in empty_caches(8, 4, 3, (40, 24), torch.float32, layout))
    k = torch.arange(32.0)[:, None, None].expand(32, 3, 40).contiguous()
    store_kv(k, k[..., :24], k_cache, v_cache, torch.arange(32))
    before = flat(k_cache.float())[:, 0, 0].tolist()
    source = torch.tensor([[3, 5, 6, 6, 40], [20, 22, -1, 25, 21]])
    target = torch.tensor([[2, 3, 5, 6, 0], [20, 21, 1, 99, 22]])
    move_kv(k_cache, v_cache, source, target)
    moved = {2: 3, 3: 5, 5: 6, 6: 6, 20: 20, 21: 22, 22: 21}
    want = [before[moved.get(slot, slot)] for slot in range(32)]
    for cache in (k_cache, v_cache):
        assert flat(cache.float())[:, 2, 7].tolist() == want


def test_move_in_all_layers() -> None:
    cache = torch.arange(2 * 8.0)[:, None].expand(16, 5).reshape(2, 4, 2, 1, 5).clone()
    move_kv(cache, cache.clone(), torch.tensor([7, 1]), torch.tensor([1, 0]))
    assert cache[..., 0].flatten(1).tolist() == [[1, 7, 2, 3, 4, 5, 6, 7], [9, 15, 10, 11, 12, 13, 14, 15]]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "k": (dict(k=torch.zeros(3, 2, 8)), r"k: expected shape \[1, any, 2, 16\], got \[1, 3, 2, 8\]"),
    "v": (dict(v=torch.zeros(2, 2, 16)), r"v: expected shape"),
    "int k": (dict(k=torch.zeros(3, 2, 16, dtype=torch.int32)), "k: expected dtype"),
    "slots": (dict(slot_mapping=torch.zeros(2, dtype=torch.int64)), r"slot_mapping: expected shape \[3\], got \[2\]"),
    "float slots": (dict(slot_mapping=torch.zeros(3)), "slot_mapping: expected dtype torch.int32 or torch.int64"),
    "cache dtype": (dict(k_cache=torch.zeros(2, 4, 2, 16).half()), "k_cache: expected dtype"),
    "scale": (dict(k_scale=torch.ones(2)), "k_cache: expected dtype torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    arguments = dict(k=torch.zeros(3, 2, 16), v=torch.zeros(3, 2, 16), slot_mapping=torch.zeros(3, dtype=torch.int64))
    caches = dict(k_cache=torch.zeros(2, 4, 2, 16), v_cache=torch.zeros(2, 4, 2, 16))
    with pytest.raises(ValueError, match=message):
        store_kv(**arguments | caches | changed)


def test_too_many_moves() -> None:
    cache, slots = torch.zeros(2, 4, 2, 16), torch.zeros(1, 129, dtype=torch.int64)
    with pytest.raises(ValueError, match="source: expected at most 128 moves in a row, got 129"):
        move_kv(cache, cache, slots, slots)
