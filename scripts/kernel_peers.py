"""Other attention kernels on the same batches, where they can be imported; each is skipped by name otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import torch
from kernel_points import Batch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

Call = Callable[[], object]


def peers(batch: Batch) -> Iterator[tuple[str, Call | str]]:
    """(name, a call that attends, or why there is none) of each peer."""
    makers = dict(fa3=flash_attention_3, flashinfer=flashinfer, sdpa=sdpa, flex=flex)
    for name, make in makers.items():
        try:
            call = make(batch)
            call()
            torch.cuda.synchronize()
        except Exception as error:  # whatever a peer raises, the others still count
            yield name, f"{type(error).__name__}: {error}".splitlines()[0][:100]
        else:
            yield name, call


def flash_attention_3(batch: Batch) -> Call:
    """The hopper build's own package, or the one inside vLLM; num_splits automatic."""
    point = batch.point
    scale, width = point.dim**-0.5, max(point.lengths)
    try:
        with_kvcache = import_module("flash_attn_interface").flash_attn_with_kvcache
    except ImportError:
        varlen = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
        return lambda: varlen(
            batch.q, *batch.caches, max_seqlen_q=point.q_len, cu_seqlens_q=batch.bounds, max_seqlen_k=width,
            seqused_k=batch.seq_lens, block_table=batch.tables[0], causal=True, softmax_scale=scale, fa_version=3,
        )  # fmt: skip
    q = batch.q.view(len(point.lengths), point.q_len, *batch.q.shape[1:])
    return lambda: with_kvcache(
        q, *batch.caches, cache_seqlens=batch.seq_lens, page_table=batch.tables[0], causal=True, softmax_scale=scale
    )


def flashinfer(batch: Batch) -> Call:
    """Decode wrapper at one query, prefill wrapper otherwise; its plan, made on the host, is not timed."""
    library, point = import_module("flashinfer"), batch.point
    counts = torch.tensor([-(-n // point.page) for n in point.lengths])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().cuda()
    indices = torch.cat([row[:n] for row, n in zip(batch.tables[0], counts.tolist(), strict=True)])
    last = torch.tensor([(n - 1) % point.page + 1 for n in point.lengths], dtype=torch.int32, device="cuda")
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    heads, kv_heads = point.heads
    if point.q_len == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, heads, kv_heads, point.dim, point.page, q_data_type=point.dtype)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            batch.bounds, indptr, indices, last, heads, kv_heads, point.dim, point.page, causal=True,
            q_data_type=point.dtype,
        )  # fmt: skip
    return lambda: wrapper.run(batch.q, batch.caches, out=batch.out)


def sdpa(batch: Batch) -> Call:
    """PyTorch's attention on keys and values copied together beforehand: what paging would cost nothing against."""
    q, k, v = contiguous(batch)
    scale, q_len, length = batch.point.dim**-0.5, q.shape[2], k.shape[2]
    mask = None if q_len == 1 or q_len == length else causal_lower_right(q_len, length)
    attend = torch.nn.functional.scaled_dot_product_attention
    if batch.point.heads[0] != batch.point.heads[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)) if mask is not None else (k, v)
    gqa = q.shape[1] != k.shape[1]
    return lambda: attend(q, k, v, attn_mask=mask, is_causal=q_len == length > 1, scale=scale, enable_gqa=gqa)


def flex(batch: Batch) -> Call:
    """torch's flex_attention, compiled, on contiguous keys and values."""
    module = import_module("torch.nn.attention.flex_attention")
    q, k, v = contiguous(batch)
    offset = k.shape[2] - q.shape[2]
    mask = module.create_block_mask(lambda b, h, i, j: j <= i + offset, None, None, q.shape[2], k.shape[2])
    attend = torch.compile(module.flex_attention, dynamic=False)
    return lambda: attend(q, k, v, block_mask=mask, scale=batch.point.dim**-0.5, enable_gqa=True)


def contiguous(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hq, Q, D], k and v [B, Hkv, L, D]. Raises ValueError unless the lengths are equal."""
    point = batch.point
    if len(set(point.lengths)) > 1:
        raise ValueError("sequences of equal lengths only")
    pos = torch.arange(point.lengths[0], device="cuda")
    blocks = batch.tables[0][:, pos // point.page].long()
    k, v = (cache[blocks, pos % point.page].transpose(1, 2).contiguous() for cache in batch.caches)
    q = batch.q.view(len(point.lengths), point.q_len, *batch.q.shape[1:])
    return q.transpose(1, 2), k, v
