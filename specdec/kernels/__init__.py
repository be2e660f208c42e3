"""Kernels of speculative decoding on a paged KV cache, usable alone: torch and triton are all they need.

Plain tensors in, plain tensors out; no cache manager is assumed. CUDA tensors run Triton kernels, others their torch twins.
"""

from specdec.kernels.accept import accept
from specdec.kernels.adjust import adjust
from specdec.kernels.columns import Adjustments
from specdec.kernels.flash import flash_attn_with_kvcache
from specdec.kernels.gated import gated_linear
from specdec.kernels.linear import linear
from specdec.kernels.match import match
from specdec.kernels.merge import merge_states
from specdec.kernels.paged_attention import paged_attention
from specdec.kernels.plan import AttentionPlan, plan_attention
from specdec.kernels.sample import Sampling, sample
from specdec.kernels.store_kv import move_kv, store_kv

__all__ = [
    "Adjustments",
    "AttentionPlan",
    "Sampling",
    "accept",
    "adjust",
    "flash_attn_with_kvcache",
    "gated_linear",
    "linear",
    "match",
    "merge_states",
    "move_kv",
    "paged_attention",
    "plan_attention",
    "sample",
    "store_kv",
]
