"""store_kv and move_kv on a GPU: natively, in a graph, past 2^31 elements, and the hardware's own fp8 rounding."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels import move_kv, store_kv
from specdec.kernels.reference import store_kv as twin
from tests.gpu.kernels.test_paged_attention import to_gpu
from tests.kernels.attention_oracle import empty_caches

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("layout", ["NHD", "HND", "KV"])
@pytest.mark.parametrize("page, heads, dims", [(1, 3, (8, 8)), (16, 8, (128, 128)), (3, 5, (80, 72)), (7, 1, (1, 20))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
def test_store_is_the_twins(layout: str, page: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """The same bits in every slot, dropped ones among them; fp8 too, scaled and saturated."""
    torch.manual_seed(0)
    made = torch.bfloat16 if dtype == FP8 else dtype
    caches = [x.to(dtype) for x in empty_caches(900 // page + 2, page, heads, dims, torch.float32, layout)]
    on_gpu = [to_gpu(x) for x in caches]
    size = caches[0].shape[0] * page
    fused = (torch.randn(333, heads, sum(dims) + 3) * 300).to(made)
    k, v = fused[..., : dims[0]], fused[..., dims[0] : sum(dims)]
    slots = torch.randperm(size)[:333]
    slots[::7], slots[3], slots[10] = -1, size, 2**40
    scales = dict(k_scale=torch.linspace(0.5, 3, heads), v_scale=torch.linspace(2, 1, heads)) if dtype == FP8 else {}
    store_kv(k, v, *caches, slots, **scales)
    store_kv(to_gpu(k), to_gpu(v), *on_gpu, slots.cuda(), **{n: s.cuda() for n, s in scales.items()})
    for want, got in zip(caches, on_gpu, strict=True):
        # Over a scale, Triton's division may be an ulp off, which is a step of fp8 now and then.
        rtol = 2**-3 if dtype == FP8 else 0
        torch.testing.assert_close(got.float().cpu(), want.float(), rtol=rtol, atol=0, equal_nan=True)


def test_store_past_2_31_elements() -> None:
    """flash-attention#772: the slot's offset in elements is no int32; its neighbours stay as they were."""
    far = 2**31 // (16 * 8 * 128) + 3
    cache = torch.zeros(far + 1, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 8, 128, dtype=torch.bfloat16, device="cuda")
    store_kv(k, k, cache, cache.clone(), torch.tensor([far * 16 + 5], device="cuda"))
    assert torch.equal(cache[far, 5], k[0])
    assert cache.count_nonzero() == k.count_nonzero()


def test_store_in_a_graph() -> None:
    k_cache, v_cache = torch.zeros(2, 3, 8, 4, 2, 64, device="cuda")
    k, v = torch.randn(2, 3, 5, 2, 64, device="cuda")
    slots = torch.full((5,), -1, dtype=torch.int64, device="cuda")
    store_kv(k, v, k_cache, v_cache, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_kv(k, v, k_cache, v_cache, slots)
    assert k_cache.count_nonzero() == 0
    slots.copy_(torch.tensor([3, -1, 31, 32, 0]))
    graph.replay()
    assert torch.equal(k_cache.view(3, 32, 2, 64)[:, [3, 31, 0]], k[:, [0, 2, 4]])
    assert torch.equal(v_cache.view(3, 32, 2, 64)[:, [3, 31, 0]], v[:, [0, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_move_is_the_twins(dtype: torch.dtype) -> None:
    """Random moves over one another within each of 50 rows."""
    torch.manual_seed(1)
    cache = torch.randn(200, 16, 8, 128).to(dtype)
    source = torch.stack([row * 64 + torch.randperm(64)[:30] for row in range(50)])
    target = torch.stack([row * 64 + torch.randperm(64)[:30] for row in range(50)])
    source[:, 5], target[:, 8], source[3, 9] = -1, -1, 2**40
    gpu = cache.cuda()
    move_kv(gpu, gpu.clone(), source.cuda(), target.cuda())
    twin.move(cache, source.flatten(), target.flatten())
    assert torch.equal(gpu.view(torch.uint8).cpu(), cache.view(torch.uint8))
