"""Decoding speed of whole batches on random weights, plain and with a draft model at a forced acceptance length.

    python scripts/bench_e2e.py [--target llama-8b] [--drafter llama-1b] [--batch 1,4,16,64,128] [--k 4,auto] [--length 3.4]

Random prompts of 512 tokens, 256 out. decode tok/s = (tokens emitted - batch) / (time of the run - time of the same run
asked for one token), the definition of the peers' figures. Every batch is run once to warm up. The acceptance length is
forced by the verifier of `specdec.bench.controlled`, which does the real work and then overrules it.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import transformers
from rich.console import Console
from rich.table import Table

from specdec import LLM, SamplingParams
from specdec.bench.controlled import ForcedLength
from specdec.bench.shapes import SHAPES, random_model
from specdec.bench.timeline import Timeline


def build(name: str) -> transformers.PreTrainedModel:
    return random_model(name, torch.bfloat16, torch.device("cuda"))


def seconds(llm: LLM, prompts: list[list[int]], tokens: int, k: int | None) -> tuple[float, list]:
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, k=k)
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    torch.cuda.synchronize()
    return time.perf_counter() - start, outputs


def measure(llm: LLM, batch: int, k: int | None, args: argparse.Namespace) -> dict:
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(10, llm.vocab_size, (batch, args.input), generator=generator).tolist()
    warm = time.perf_counter()
    seconds(llm, prompts, args.output, k)  # the whole run, so that a draining batch finds its graphs too
    seconds(llm, prompts, 1, k)
    warm = time.perf_counter() - warm
    one, _ = seconds(llm, prompts, 1, k)
    whole, outputs = seconds(llm, prompts, args.output, k)
    emitted = sum(len(o.token_ids) for o in outputs)
    rounds = max(o.stats.rounds for o in outputs)
    return {
        "batch": batch,
        "k": "auto" if k is None else k,
        "decode_tok_s": (emitted - batch) / (whole - one),
        "whole_tok_s": emitted / whole,
        "acceptance_length": sum(o.stats.acceptance_length for o in outputs) / batch,
        "round_ms": 1e3 * (whole - one) / rounds,
        "prefill_s": one,
        "warm_s": warm,
        "errors": [repr(o.error) for o in outputs if o.error][:1],
    }


def profile(llm: LLM, batch: int, k: int | None, args: argparse.Namespace) -> None:
    """Where a round's time goes: how long the device idled, what was copied, and the kernels by their own time."""
    prompts = torch.randint(10, llm.vocab_size, (batch, args.input)).tolist()
    params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True, k=k)
    handles = [llm.submit(prompt, params) for prompt in prompts]
    for handle in handles:
        next(iter(handle))  # past its prompt
    rounds = llm.stats.rounds
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for handle in handles:
            handle.results()
        torch.cuda.synchronize()
    rounds = llm.stats.rounds - rounds
    whole = Timeline.of(prof)
    late = whole.later(0.25)  # the first rounds under a profiler are slow
    waiting, between = (100 * us / late.whole_us for us in (late.waiting_us, late.between_us))
    print(
        f"batch {batch} k {k}: {len(whole.works) / rounds:.0f} kernels a round, device idle {waiting + between:.1f} %, "
        f"{waiting:.1f} between rounds and {between:.1f} within; {whole.copied(rounds).line}"
    )
    totals: dict[str, list[float]] = {}
    for work in whole.works:
        total = totals.setdefault(work.name[:90], [0, 0.0])
        total[0] += 1
        total[1] += work.end - work.start  # of which starts that overlap count in both kernels
    for name, (count, us) in sorted(totals.items(), key=lambda item: -item[1][1])[:28]:
        print(f"{us / rounds:9.1f} us {count / rounds:7.1f} x  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-8b", choices=SHAPES)
    parser.add_argument("--drafter", default="llama-1b", help="a shape, lookup or none")
    parser.add_argument("--batch", default="1,4,16,64,128")
    parser.add_argument("--k", default="4", help="drafts per row and round, or auto, or several of these")
    parser.add_argument("--length", type=float, default=3.4)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--warm-up", action="store_true", help="for the batches of --batch, before the first token")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--profile", default="", help="batches of which to show where a round's time goes")
    parser.add_argument("--json")
    args = parser.parse_args()
    drafter = build(args.drafter) if args.drafter in SHAPES else None if args.drafter == "none" else args.drafter
    choices = [None if word == "auto" else int(word) for word in args.k.split(",")] if drafter is not None else []
    start = time.perf_counter()
    llm = LLM(
        build(args.target), drafter=drafter, k="auto", max_model_len=1024, max_rows=128, prompt_budget=8192,
        compile=not args.no_compile, graphs=not args.no_graphs,
    )  # fmt: skip
    if args.drafter in SHAPES:
        llm.engine.round.verifier = ForcedLength(llm.vocab_size, args.length)
    llm.warm_up([int(batch) for batch in args.batch.split(",")] if args.warm_up else False)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0, k=0))
    how = "without compiled layers" if args.no_compile else "with compiled layers"
    how += ", warmed up" if args.warm_up else ""
    print(f"start to first token {time.perf_counter() - start:.1f} s, {how}", flush=True)
    rows = []
    for batch in map(int, args.batch.split(",")):
        for k in (0, *choices):
            rows.append(measure(llm, batch, k, args))
            print(rows[-1], flush=True)
            if str(batch) in args.profile.split(","):
                profile(llm, batch, k, args)
    table = Table(
        "batch", "k", "decode tok/s", "whole tok/s", "acceptance length (controlled)", "ms per round", "warm-up s"
    )
    for r in rows:
        table.add_row(
            str(r["batch"]), str(r["k"]), f"{r['decode_tok_s']:.0f}", f"{r['whole_tok_s']:.0f}",
            f"{r['acceptance_length']:.2f}",
            f"{r['round_ms']:.2f}", f"{r['warm_s']:.1f}",
        )  # fmt: skip
    Console().print(table)
    device = torch.cuda.get_device_name()
    line = json.dumps(
        {"target": args.target, "drafter": args.drafter, "device": device, "torch": torch.__version__, "rows": rows}
    )
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")
    llm.close()


if __name__ == "__main__":
    main()
