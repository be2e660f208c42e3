"""The plug-in on a GPU: `model.generate` beside the engine's own `LLM.generate`, and beside transformers' own loops.

    python scripts/bench_hf.py [--shapes smollm2-135m,llama-8b] [--drafter llama-1b] [--batch 16] [--k 4] [--json FILE]

1. Greedy decoding of a batch, for every shape: the engine by itself, the enabled model, transformers. tok/s = tokens
   emitted / time of the call, and "decode" less the time of the same call asked for one token. Medians of `--repeats`.
2. Assisted decoding of one row by the last shape with `--drafter`, k drafts an iteration: milliseconds of an iteration,
   which is (time of the call - time of the same call asked for one token) / iterations, in transformers and here. An
   iteration drafts k tokens in both: transformers' confidence threshold is off and its schedule constant.

Weights are random, so hardly a draft is accepted: an iteration's time is compared, not what it emits.
Prints a table for each, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import specdec.hf
from specdec import LLM, SamplingParams, __version__
from specdec.bench.shapes import SHAPES, random_model

KEPT = 48
"""Positions that rows have beyond input and output: the drafts of the last round."""


@dataclass(frozen=True)
class Timing:
    """A call asked for all tokens and for one: seconds, medians. output: its tokens, a list for every row.

    counted: by how much the counters differ between the two.
    """

    whole: float
    one: float
    output: list[list[int]]
    counted: dict[str, int]

    def rates(self, emitted: int, rows: int) -> dict[str, float]:
        return {"whole_tok_s": emitted / self.whole, "decode_tok_s": (emitted - rows) / (self.whole - self.one)}

    def iteration(self) -> dict[str, float]:
        """Milliseconds, and drafts, of an iteration."""
        n = self.counted["iterations"]
        drafts = self.counted["drafts"] / n
        return {"iteration_ms": 1e3 * (self.whole - self.one) / n, "iterations": n, "drafts_per_iteration": drafts}


def timed(
    call: Callable[[int], list[list[int]]],
    tokens: int,
    repeats: int,
    counters: dict[str, Callable[[], int]] | None = None,
) -> Timing:
    """`call(n)` decodes n tokens a row. counters: what they give is read around each call."""
    seconds: dict[int, list[float]] = {1: [], tokens: []}
    counts: dict[int, dict[str, int]] = {}
    output: list[list[int]] = []
    for _ in range(repeats):
        for n in seconds:
            before = {name: count() for name, count in (counters or {}).items()}
            synchronise()
            start = time.perf_counter()
            output = call(n)
            synchronise()
            seconds[n].append(time.perf_counter() - start)
            counts[n] = {name: count() - before[name] for name, count in (counters or {}).items()}
    whole, one = (statistics.median(seconds[n]) for n in (tokens, 1))
    return Timing(whole, one, output, {name: n - counts[1][name] for name, n in counts[tokens].items()})


def warm(call: Callable[[int], list[list[int]]], tokens: int) -> None:
    """Run both lengths once, so that graphs and compiled layers are there."""
    for n in (tokens, 1):
        call(n)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def generating(model: Any, inputs: torch.Tensor, **arguments: Any) -> Callable[[int], list[list[int]]]:
    """`model.generate` as a function of the number of new tokens."""
    mask = torch.ones_like(inputs)

    def call(tokens: int) -> list[list[int]]:
        out = model.generate(
            inputs, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **arguments
        )
        return out[:, inputs.shape[1] :].tolist()

    return call


def prompts_of(model: Any, rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(10, model.config.vocab_size, (rows, length), generator=generator).to(model.device)


def batch(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy decoding of `--batch` rows, by the engine, by the enabled model and by transformers."""
    inputs = prompts_of(model, args.batch, args.input)
    rows, sizes = inputs.tolist(), {"max_rows": args.batch, "max_model_len": args.input + args.output + KEPT}
    found = {}
    with LLM(model, **sizes) as llm:

        def engine(tokens: int) -> list[list[int]]:
            llm.reset_prefix_cache()  # as the plug-in does between two calls
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            return [output.token_ids for output in llm.generate(rows, params)]

        warm(engine, args.output)
        found["engine"] = timed(engine, args.output, args.repeats)
    with specdec.hf.enable(model, plain=True, **sizes):
        call = generating(model, inputs)
        warm(call, args.output)
        found["plug-in"] = timed(call, args.output, args.repeats)
    found["transformers"] = timed(call, args.output, 1)
    rates = {name: timing.rates(args.batch * args.output, args.batch) for name, timing in found.items()}
    same = {name: agreeing(found[name].output, found["engine"].output) for name in ("plug-in", "transformers")}
    return {"rates": rates, "rows_as_the_engine": same}


def agreeing(ours: list[list[int]], others: list[list[int]]) -> int:
    """Rows with the same tokens. In bf16 a near tie may fall either way in another product."""
    return sum(a == b for a, b in zip(ours, others, strict=True))


class Forwards:
    """Within it counts the forwards of `model`."""

    def __init__(self, model: Any):
        self.model, self.count = model, 0

    def __enter__(self) -> Forwards:
        self.hook = self.model.get_input_embeddings().register_forward_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def _count(self, *_: object) -> None:
        self.count += 1


def assisted(model: Any, drafter: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One row with `--k` drafts an iteration, by transformers' assisted generation and by the enabled model."""
    inputs, k = prompts_of(model, 1, args.input), args.k
    settings = drafter.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
    settings.assistant_confidence_threshold = 0.0
    call = generating(model, inputs, assistant_model=drafter)
    call(2)
    with Forwards(model) as target, Forwards(drafter) as draft:
        counters = {"iterations": lambda: target.count, "drafts": lambda: draft.count}
        theirs = timed(call, args.output, 1, counters)
    with specdec.hf.enable(model, k=k, max_rows=1, max_model_len=args.input + args.output + KEPT) as enabled:
        call = generating(model, inputs, assistant_model=drafter, num_assistant_tokens=k)
        warm(call, args.output)
        counters = {"iterations": lambda: enabled.stats.rounds, "drafts": lambda: enabled.stats.drafted}
        ours = timed(call, args.output, args.repeats, counters)
    found: dict[str, Any] = {"transformers": theirs.iteration(), "plug-in": ours.iteration()}
    found["same_tokens"] = ours.output == theirs.output
    found["ratio"] = found["transformers"]["iteration_ms"] / found["plug-in"]["iteration_ms"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2-135m,llama-8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--drafter", default="llama-1b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    start, result = time.perf_counter(), {"batches": {}, "assisted": None}
    for shape in args.shapes.split(","):
        model = random_model(shape, dtype, device)
        result["batches"][shape] = batch(model, args)
        print(f"{time.perf_counter() - start:5.1f} s  {shape}: {result['batches'][shape]}", flush=True)
    drafter = random_model(args.drafter, dtype, device, seed=1)
    result["assisted"] = assisted(model, drafter, args)
    print(f"{time.perf_counter() - start:5.1f} s  assisted: {result['assisted']}", flush=True)
    show(result, args)
    words = f"--shapes {args.shapes} --drafter {args.drafter} --batch {args.batch} --k {args.k} --input {args.input}"
    result["command"] = f"scripts/bench_hf.py {words} --output {args.output}"
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    result["versions"] = {m.__name__: m.__version__ for m in (torch, transformers)} | {"specdec": __version__}
    line = json.dumps(result)
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    table = Table(
        "shape", "loop", "decode tok/s", "whole tok/s", "of the engine's (decode, whole)", "rows as the engine's"
    )
    for shape, found in result["batches"].items():
        engine = found["rates"]["engine"]
        for name, rate in found["rates"].items():
            shares = (rate[key] / engine[key] for key in ("decode_tok_s", "whole_tok_s"))
            table.add_row(
                shape,
                name,
                f"{rate['decode_tok_s']:.0f}",
                f"{rate['whole_tok_s']:.0f}",
                ", ".join(f"{share:.2f}" for share in shares),
                f"{found['rows_as_the_engine'].get(name, args.batch)} of {args.batch}",
            )
    Console().print(table)
    table = Table("one row, assisted", "ms per iteration", "iterations", "drafts per iteration")
    for name in ("transformers", "plug-in"):
        found = result["assisted"][name]
        table.add_row(
            name, f"{found['iteration_ms']:.2f}", str(found["iterations"]), f"{found['drafts_per_iteration']:.2f}"
        )
    Console().print(table)
    print(f"transformers' iteration / the plug-in's: {result['assisted']['ratio']:.1f}")


if __name__ == "__main__":
    main()
