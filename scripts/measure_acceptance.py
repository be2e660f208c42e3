"""Acceptance of the verifiers on real pairs: SmolLM2-135M and three drafters, over fixed text, by exact probabilities.

`python scripts/measure_acceptance.py [--tokens 60]`. Every position of the text is one decision. Each model reads the text
once; with both distributions at a position known, the probability that a draft is accepted there is a sum, not a sample:
ratio test sum min(p, q); coupled sampling the mean over common noise; point masses p at the draft. Block verification
depends on whole blocks: chains of k drafts are drawn from the drafter, from every few positions on, and judged exactly.
Prints each row as it is measured, then a table and one JSON line. Nine minutes on two cores with the default.
"""

from __future__ import annotations

import argparse
import copy
import json

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from specdec.kernels.match import match
from specdec.loading import load_model
from specdec.verify import Chain, block, rejection

TEXTS = (
    "The lighthouse stood at the end of the pier, and every evening the keeper climbed its ninety steps to light the lamp. "
    "He had done so for thirty years, in storms and in calm weather, and nobody in the village could remember another.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n\n\n"
    "def variance(values):\n    center = mean(values)\n    total = 0\n    for value in values:\n        "
    "total += (value - center) ** 2\n    return total / len(values)\n",
    "Correct the spelling.\nText: The commitee has recieved your aplication and will anser within ten days.\n"
    "Corrected: The committee has received your application and will answer within ten days.\n",
)
TEMPERATURES = (0.0, 0.7, 1.0)
NOISES, CHAINS, K = 64, 32, 4


def quantised(model: torch.nn.Module, bits: int, group: int = 32) -> torch.nn.Module:
    """A copy whose decoder layers' weights are rounded to the nearest of 2^bits levels, per group of 32 inputs."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and ".layers." in name:
                groups = weight.view(-1, group)
                scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                groups.copy_((groups / scale.clamp(min=1e-9)).round() * scale)
    return model


def early(model: torch.nn.Module, layers: int) -> torch.nn.Module:
    """A copy that ends after its first layers."""
    model = copy.deepcopy(model)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return model


@torch.inference_mode()
def probabilities(model: torch.nn.Module, ids: Tensor, temperature: float) -> Tensor:
    """[len(ids), V] fp64: of the token after each prefix."""
    logits = model(ids[None], use_cache=False).logits[0].double()
    if temperature == 0:
        return torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1.0)
    return (logits / temperature).softmax(1)


def per_token(p: Tensor, q: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Acceptance of one draft at every position, [T]: drawn and tested, coupled, greedy."""
    noise = -torch.empty(NOISES, p.shape[1], dtype=torch.float64).exponential_(generator=generator).log()
    log_p, log_q = p.log(), q.log()
    equal = torch.zeros(len(p), dtype=torch.float64)
    for g in noise:
        equal += ((log_p + g).argmax(1) == (log_q + g).argmax(1)).double()
    return {
        "rejection": torch.minimum(p, q).sum(1),
        "coupled": equal / NOISES,
        "greedy drafts": p.gather(1, q.argmax(1, keepdim=True))[:, 0],
    }


def lookup(p: Tensor, ids: Tensor) -> tuple[Tensor, float]:
    """Acceptance of looked-up drafts where there is one, and the share of positions that have one."""
    rows = ids.int().expand(len(ids), -1).contiguous()
    tokens, counts, _ = match(rows, torch.arange(1, len(ids) + 1), k=1, max_match=16, min_match=1)
    found = counts > 0
    return p[found].gather(1, tokens[found])[:, 0], float(found.double().mean())


@torch.inference_mode()
def chains(
    target: torch.nn.Module, draft: torch.nn.Module, ids: Tensor, temperature: float, generator: torch.Generator
) -> dict[str, float]:
    """Expected drafts accepted of K, by the ratio test and by block verification, of chains drawn from the drafter."""
    starts = range(len(ids) // 4, len(ids), max(1, len(ids) // 4))
    totals = {"rejection": 0.0, "block": 0.0}
    for start in starts:
        tokens, drawn = drawn_chains(draft, ids[:start], temperature, generator)
        logits = torch.cat(after(target, ids[:start], tokens), 1)
        p = softened(logits.double(), temperature).flatten(0, 1)
        at = torch.arange(CHAINS * (K + 1)).view(CHAINS, K + 1)
        chain = Chain(p, at, tokens, torch.full((CHAINS,), K), drawn)
        for name, method in (("rejection", rejection), ("block", block)):
            totals[name] += float(method(chain).survival.sum())
    return {name: total / (len(starts) * CHAINS) for name, total in totals.items()}


def drawn_chains(
    model: torch.nn.Module, ids: Tensor, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """CHAINS chains of K tokens after `ids`, [CHAINS, K], and the probabilities each was drawn from, [CHAINS, K, V]."""
    out = model(ids[None], use_cache=True)
    cache, logits = out.past_key_values, out.logits[:, -1].expand(CHAINS, -1)
    cache.batch_repeat_interleave(CHAINS)
    tokens, drawn = [], []
    for _ in range(K):
        drawn.append(softened(logits.double(), temperature))
        tokens.append(drawn[-1].multinomial(1, generator=generator))
        logits = model(tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1]
    return torch.cat(tokens, 1), torch.stack(drawn, 1)


def after(model: torch.nn.Module, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits after `ids`, [CHAINS, 1, V], and after each token of the chains behind them, [CHAINS, K, V]."""
    out = model(ids[None], use_cache=True)
    out.past_key_values.batch_repeat_interleave(CHAINS)
    return out.logits[:, -1:].expand(CHAINS, -1, -1), model(tokens, past_key_values=out.past_key_values).logits


def softened(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return (logits / temperature).softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=60, help="of each text at most")
    tokens = parser.parse_args().tokens
    loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
    target = loaded.model.eval()
    texts = [torch.tensor(loaded.tokenizer(text)["input_ids"][:tokens]) for text in TEXTS]
    drafters = {
        "4-bit copy": quantised(target, 4),
        "3-bit copy": quantised(target, 3),
        "first 24 of 30 layers": early(target, 24),
    }
    rows = []
    for temperature in TEMPERATURES:
        generator = torch.Generator().manual_seed(0)
        p = [probabilities(target, ids, temperature) for ids in texts]
        looked = [lookup(each, ids) for each, ids in zip(p, texts, strict=True)]
        accepted = float(torch.cat([values for values, _ in looked]).mean())
        share = sum(s * len(ids) for (_, s), ids in zip(looked, texts, strict=True)) / sum(map(len, texts))
        add(rows, {"drafter": "look-up", "temperature": temperature, "drafted": share, "point mass": accepted})
        for name, draft in drafters.items():
            found = [
                per_token(each, probabilities(draft, ids, temperature), generator)
                for each, ids in zip(p, texts, strict=True)
            ]
            row = {"drafter": name, "temperature": temperature}
            row |= {key: float(torch.cat([f[key] for f in found]).mean()) for key in found[0]}
            of = [chains(target, draft, ids, temperature, generator) for ids in texts]
            row |= {f"{key} of {K}": sum(o[key] for o in of) / len(of) for key in of[0]}
            add(rows, row)
    show(rows, sum(map(len, texts)))


def add(rows: list[dict], row: dict) -> None:
    """Keep a row, and show it at once: whoever stops early has what was measured."""
    print(json.dumps(row), flush=True)
    rows.append(row)


def show(rows: list[dict], positions: int) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*keys, title=f"{positions} positions, SmolLM2-135M, fp32")
    for row in rows:
        cells = [row.get(key, "") for key in keys]
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else cell for cell in cells))
    Console(width=160).print(table)
    print(json.dumps({"positions": positions, "rows": rows}))


if __name__ == "__main__":
    main()
