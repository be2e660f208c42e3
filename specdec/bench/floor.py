"""The bandwidth floor of a round: the bytes that it cannot avoid to read, over the copy bandwidth of this device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdec.kvpool import KVPool

_GPU_BYTES, _CPU_BYTES = 1 << 30, 1 << 28
_COPIES = 5


@dataclass(frozen=True)
class Floor:
    """bytes: weights and KV that a round reads at least; percent: floor over the measured round, 100 is the best."""

    bytes: int
    ms: float
    percent: float


@dataclass(frozen=True)
class Traffic:
    """What one model reads in a forward: weight bytes, and KV bytes per token of context."""

    weights: int
    kv_per_token: float

    def forward(self, context_tokens: float) -> float:
        """Bytes of one forward over sequences of `context_tokens` tokens in all."""
        return self.weights + self.kv_per_token * context_tokens


def traffic(model: PreTrainedModel, pool: KVPool, name: str) -> Traffic:
    """Of `model`, whose KV is in `pool` under `name`. An embedding that is not also the head is not read as a whole."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    if not tied:
        weights.pop(embedding.weight.data_ptr(), None)
    kv = sum(t.numel() * t.element_size() for pair in pool.kv(name) for t in pair)
    return Traffic(sum(weights.values()), kv / (pool.num_blocks * pool.block_size))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of the fastest of a few large copies on `device`."""
    size = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(_copy_seconds(source, target) for _ in range(_COPIES))
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size / best


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    if source.device.type == "cpu":
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def floor(
    target: Traffic, drafter: Traffic | None, depth: float, context: float, round_s: float, bandwidth: float
) -> Floor:
    """Of one round. depth: forwards of the drafter in it; context: tokens of all its sequences; bandwidth: bytes/s."""
    size = target.forward(context) + (depth * drafter.forward(context) if drafter else 0)
    seconds = size / bandwidth
    return Floor(round(size), 1e3 * seconds, 100 * seconds / round_s if round_s else 0.0)
