"""Attention of several query tokens per sequence over a paged KV cache: prompts, decoding and verification in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels import launch
from specdec.kernels.backend import use_triton
from specdec.kernels.check import FLOATS, FP8, check, check_caches
from specdec.kernels.options import Options, check_options
from specdec.kernels.plan import AttentionPlan, plan_attention
from specdec.kernels.reference import attention as reference


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    causal: bool = True,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the last tokens of R sequences, whose keys and values are in the caches already.

    q [T, Hq, D] holds the new tokens of all sequences one after another; k_cache [num_blocks, block_size, Hkv, D] and
    v_cache [num_blocks, block_size, Hkv, Dv] may be views of any strides with a contiguous last dimension (permute an
    HND cache), of q's dtype or float8_e4m3fn. Position p of sequence r is in block block_table[r, p // block_size];
    entries past a sequence's end are never followed. Returns out [T, Hq, Dv] (in `out` if given), and with `return_lse`
    also the natural log of the softmax denominator [T, Hq] fp32.

    seq_lens [R] int32 **includes the new tokens**; cu_seqlens_q [R + 1] int32 bounds each sequence's rows of q, and
    `max_seqlen_q` is an upper bound of their number. The last query sits at position seq_lens - 1 (bottom-right
    alignment). Rows of q past cu_seqlens_q[-1] are padding: like queries that see no key they come out as 0, with an lse
    of -inf (of the sink's logit, where there are sinks).

    window: a key is seen iff query position - key position < window. softcap: scores become cap * tanh(score / cap).
    sinks [Hq] fp32: logits that join the denominator. alibi_slopes [Hq] fp32: scores get -slope * |distance|.
    tree_mask [T] or [T, W] int64: bit j of word j // 64 of a query says whether it sees the j-th of its sequence's new
    keys; earlier keys are seen by all, and a node's position is that of the first new token plus its number of ancestors.
    In a sequence of more than 64 W new tokens (a prompt beside trees) the bits are ignored, and attention is causal.
    k_scale, v_scale [Hkv] fp32, > 0: what float8 caches are multiplied by.

    plan: one `plan_attention` of the same tensors for all layers of a forward; made here if absent. Inference only.
    Raises ValueError for tensors that don't fit and options that exclude each other.

    The method is FlashAttention-2's online softmax (Dao, 2023) over a block table (Kwon et al., 2023), with split KV
    (flash-decoding) at every number of queries and the queries of a group of heads packed into one tile of rows.
    """
    check("q", q, (None, None, None), FLOATS, unit_stride=True)
    check("k_cache", k_cache, (None, None, None, q.shape[2]))
    check_caches(k_cache, v_cache, (q.dtype, FP8), q.device)
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"q: expected a multiple of {k_cache.shape[2]} heads, got {q.shape[1]}")
    if tree_mask is not None and tree_mask.ndim == 1:
        tree_mask = tree_mask[:, None]
    options = Options(scale, window, softcap, sinks, alibi_slopes, causal, tree_mask, k_scale, v_scale)
    check_options(options, q, k_cache.shape[2], k_cache.dtype)
    if plan is None:
        plan = plan_attention(block_table, seq_lens, cu_seqlens_q, max_seqlen_q)
    elif not plan.covers(block_table, seq_lens, cu_seqlens_q):
        raise ValueError("plan: expected one made of this block_table, seq_lens and cu_seqlens_q, got another's")
    if seq_lens.device != q.device:
        raise ValueError(f"seq_lens: expected device {q.device}, got {seq_lens.device}")
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    else:
        check("out", out, (*q.shape[:2], v_cache.shape[3]), FLOATS, q.device, unit_stride=True)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    attend = launch.attend if use_triton(q) else reference.attend
    attend(q, k_cache, v_cache, plan, options, out, lse)
    return out if lse is None else (out, lse)
