"""What KV in fp8 costs in quality: SmolLM2-135M over the prompts that ship, teacher-forced, against fp32 KV.

`python scripts/measure_fp8.py [--prompts 21] [--weights fp32|bf16|all]`. Each way of keeping KV reads every prompt once, and
its next-token distribution at every position is compared with that of fp32 weights over fp32 KV: KL divergence in nats,
positions whose likeliest token is another, and the reference's greedy margin there (how far its two likeliest logits are
apart). Unit scales stand beside calibrated ones, in the model as it is and in a copy that computes the same with keys 64 times
as large and values 256 times as small. The model in bf16 over its own KV is the yardstick. Prints each row as it is measured,
then a table and one JSON line. Two minutes of a CPU core for fp32, many more for bf16 where the CPU has no instructions for it.
"""

from __future__ import annotations

import argparse
import copy
import json

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from specdec.bench.workload import SHIPPED, tokenized
from specdec.kvpool import KVPool
from specdec.loading import load_model
from specdec.model import KVScales, Packed, PagedModel, kv_specs, scales_for
from specdec.prompt_file import read_prompts


def packed(ids: list[int]) -> Packed:
    """A whole prompt in the one block of a pool."""
    n = len(ids)
    return Packed(
        token_ids=torch.tensor(ids),
        positions=torch.arange(n),
        slot_mapping=torch.arange(n),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, n], dtype=torch.int32),
        max_seqlen_q=n,
    )


def log_probs(model: PreTrainedModel, scales: KVScales | None, prompts: list[list[int]]) -> list[Tensor]:
    """[tokens, V] fp32 for every prompt; scales: of fp8 KV, None for the model's own dtype."""
    paged = PagedModel(model, KVPool(1, max(map(len, prompts))), "target", scales=scales)
    try:
        return [paged.extend(packed(ids)).float().log_softmax(-1) for ids in prompts]
    finally:
        paged.close()


def rescaled(model: PreTrainedModel, keys: float, values: float) -> PreTrainedModel:
    """A copy of a Llama that computes the same with keys and values so many times as large (powers of two)."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for linear, factor in (
                (attention.k_proj, keys),
                (attention.q_proj, 1 / keys),
                (attention.v_proj, values),
                (attention.o_proj, 1 / values),
            ):
                linear.weight.mul_(factor)
    return model


def compared(want: list[Tensor], got: list[Tensor]) -> dict[str, float]:
    """Over all positions: KL(want || got), how often the likeliest token is another, want's margins there."""
    divergence = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(want, got, strict=True)])
    tops = torch.cat([p.topk(2).values for p in want])
    other = torch.cat([p.argmax(-1) != q.argmax(-1) for p, q in zip(want, got, strict=True)])
    margins = (tops[:, 0] - tops[:, 1])[other]
    return {
        "KL mean": float(divergence.mean()),
        "KL 99 %": float(divergence.quantile(0.99)),
        "KL max": float(divergence.max()),
        "other token": float(other.double().mean()),
        "margin there, mean": float(margins.mean()) if len(margins) else 0.0,
        "margin there, max": float(margins.max()) if len(margins) else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=21, help="of those that ship")
    parser.add_argument("--weights", choices=("fp32", "bf16", "all"), default="all")
    options = parser.parse_args()
    loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
    model = loaded.model
    prompts = tokenized("shipped", read_prompts(SHIPPED)[: options.prompts], loaded.tokenizer, None).prompts
    unit = KVScales.unit(kv_specs(model))
    want = log_probs(model, None, prompts)
    rows: list[dict] = []

    def add(weights: str, kv: str, model: PreTrainedModel, scales: KVScales | None) -> None:
        rows.append({"weights": weights, "KV": kv} | compared(want, log_probs(model, scales, prompts)))
        print(json.dumps(rows[-1]), flush=True)

    if options.weights != "bf16":
        add("fp32", "fp8, calibrated on random tokens", model, scales_for(model))
        add("fp32", "fp8, calibrated on half of the prompts", model, scales_for(model, prompts[::2]))
        add("fp32", "fp8, unit scales", model, unit)
        other = rescaled(model, 64, 1 / 256)
        add("fp32, the same with other K and V", "fp32", other, None)
        add("fp32, the same with other K and V", "fp8, calibrated on random tokens", other, scales_for(other))
        add("fp32, the same with other K and V", "fp8, unit scales", other, unit)
    if options.weights != "fp32":
        half = copy.deepcopy(model).bfloat16()
        add("bf16", "bf16", half, None)
        add("bf16", "fp8, calibrated on random tokens", half, scales_for(half))
    tops = torch.cat([p.topk(2).values for p in want])
    show(rows, len(tops), float((tops[:, 0] - tops[:, 1]).median()))


def show(rows: list[dict], positions: int, margin: float) -> None:
    table = Table(*rows[0], title=f"{positions} positions, SmolLM2-135M; median greedy margin {margin:.2f}")
    for row in rows:
        table.add_row(*(f"{cell:.2g}" if isinstance(cell, float) else cell for cell in row.values()))
    Console(width=180).print(table)
    print(json.dumps({"positions": positions, "median margin": margin, "rows": rows}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
