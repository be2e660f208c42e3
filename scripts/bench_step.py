"""Where the time of a round goes, and of a layer: on random weights, plain and with a draft model at a forced acceptance.

    python scripts/bench_step.py [--target llama-8b] [--drafter llama-1b] [--batch 1,16] [--k 4] [--context 1024] [--json FILE]

Rounds are those of `specdec bench` (docs/benchmarking.md): draft, verify, sample, other, host, idle, beside the bandwidth
floor, and on a GPU the bytes that a round copies. Layers: the products of all layers back to back against the bytes of
their weights, and what is left of a layer in a whole forward of the same tokens at that context (attention, norms, rotary
angles, activation, stored KV; embedding, last norm and the plan of the attention are divided among the layers). On a GPU
both are replays of CUDA graphs.
Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import kernel_timing
import torch
from rich.console import Console
from torch import Tensor, nn

from specdec.bench.benchmark import Benchmark
from specdec.bench.document import Document
from specdec.bench.settings import Settings
from specdec.bench.sheet import Sheet
from specdec.bench.table import print_results
from specdec.model import Packed, PagedModel
from specdec.model.fusion import Fused
from specdec.model.layers import decoder_layers
from specdec.model.products import linear


@dataclass(frozen=True)
class Layer:
    """Microseconds of one layer of a model in a forward of `tokens` tokens of each of `batch` rows."""

    model: str
    batch: int
    tokens: int
    products_us: float
    floor_us: float
    rest_us: float
    forward_ms: float

    @property
    def percent(self) -> float:
        """Of the copy bandwidth, that the products reach."""
        return 100 * self.floor_us / self.products_us


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, warm: replays of its graph on a GPU, else the median of five calls."""
    if device.type == "cuda":
        call()  # compiles layers; the capture runs it once more
        return kernel_timing.seconds(call, budget=0.1)
    call()
    return statistics.median(_timed(call) for _ in range(5))


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def products_of(layer: nn.Module, paged: PagedModel) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of the products that a layer runs in a paged forward: fused ones once."""
    fused = {linear: group for group in paged.products if isinstance(group, Fused) for linear in group.linears}
    modules = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    return [(owner.weight, owner.bias) for owner in dict.fromkeys(fused.get(m, m) for m in modules)]


def packed(batch: int, tokens: int, context: int, paged: PagedModel) -> Packed:
    """`tokens` new tokens of each of `batch` rows that have `context` tokens with them. The rows' blocks follow each other."""
    device, size = paged.device, paged.pool.block_size
    blocks = -(-context // size)
    positions = torch.arange(context - tokens, context, device=device).repeat(batch)
    row = torch.arange(batch, device=device).repeat_interleave(tokens)
    table = torch.arange(batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)
    return Packed(
        token_ids=torch.randint(10, paged.vocab_size, (batch * tokens,), device=device),
        positions=positions,
        slot_mapping=(row * blocks + positions // size) * size + positions % size,
        block_table=table,
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device),
        max_seqlen_q=tokens,
    )


@torch.inference_mode()
def measure_layer(name: str, paged: PagedModel, batch: int, tokens: int, context: int, bandwidth: float) -> Layer:
    layers, head = decoder_layers(paged.model), paged.model.get_output_embeddings()
    weights = [products_of(layer, paged) for layer in layers]
    inputs = {w.shape[1]: torch.randn(batch * tokens, w.shape[1]).to(w) for w, _ in [*weights[0], (head.weight, None)]}

    def run(products: list[tuple[Tensor, Tensor | None]]) -> None:
        for weight, bias in products:
            linear(inputs[weight.shape[1]], weight, bias)

    arguments = packed(batch, tokens, context, paged)
    whole = seconds(lambda: paged.extend(arguments), paged.device)
    products = seconds(lambda: run([pair for layer in weights for pair in layer]), paged.device)
    last = seconds(lambda: run([(head.weight, head.bias)]), paged.device)
    size = sum(w.nbytes for layer in weights for w, _ in layer)
    each = 1e6 / len(layers)
    rest = (whole - products - last) * each
    return Layer(name, batch, tokens, products * each, size / bandwidth * each, rest, 1e3 * whole)


def measure_layers(bench: Benchmark, args: argparse.Namespace) -> list[Layer]:
    """The target verifying and decoding, the drafter drafting, at every batch."""
    engine, bandwidth, found = bench.stand.llm.engine, bench.bandwidth, []
    for batch in bench.settings.batch:
        work = [("target", engine.target, 1)]
        if engine.draft_model:
            work += [("target", engine.target, args.k + 1), ("drafter", engine.draft_model, 1)]
        found += [measure_layer(name, model, batch, n, args.context, bandwidth) for name, model, n in work]
    return found


def show_rounds(document: Document, console: Console) -> None:
    print_results(document, console)
    for r in document.results:
        if r.split and r.split.copied:
            console.print(f"{r.arm}, batch {r.batch}: {r.split.copied.line}")


def show_layers(layers: list[Layer], console: Console) -> None:
    columns = ("products us", "% of bandwidth", "rest us", "forward ms")
    sheet = Sheet("A layer", ("batch", "method", "tokens a row"), columns)
    for layer in layers:
        figures = f"{layer.products_us:.1f}", f"{layer.percent:.0f}", f"{layer.rest_us:.1f}", f"{layer.forward_ms:.2f}"
        sheet.rows.append([str(layer.batch), layer.model, str(layer.tokens), *figures])
    sheet.show(console)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-8b", help="a named shape or a config.json")
    parser.add_argument("--drafter", default="llama-1b", help="the same, or none")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--length", type=float, default=3.4, help="acceptance length to force")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    drafter = None if args.drafter == "none" else args.drafter
    settings = Settings(
        args.target, drafter, methods=("plain", "draft") if drafter else ("plain",), k=(args.k,), random_weights=True,
        batch=tuple(map(int, args.batch.split(","))), input_lens=(args.context - args.output,), output_len=args.output,
        runs=args.runs, acceptance_length=args.length, prompt_budget=8192, device=args.device,
    )  # fmt: skip
    bench, console = Benchmark(settings, sys.argv), Console(width=160)
    document = bench.run()
    show_rounds(document, console)
    layers = measure_layers(bench, args)
    bench.close()
    show_layers(layers, console)
    result = {
        "command": sys.argv, "environment": asdict(document.environment), "controlled": document.controlled,
        "rounds": [
            {"method": r.arm, "batch": r.batch, "round_ms": r.round_ms and r.round_ms.median,
             "split": r.split and asdict(r.split), "floor": r.floor and asdict(r.floor)}
            for r in document.results
        ],
        "layers": [asdict(layer) | {"percent": layer.percent} for layer in layers],
        "failures": [asdict(failure) for failure in document.failures],
    }  # fmt: skip
    line = json.dumps(result)
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
