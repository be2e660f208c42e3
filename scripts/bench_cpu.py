"""Plain decoding, look-up drafting and transformers `generate` on real prompts, one after another in one run.

    python scripts/bench_cpu.py [--model smollm2-135m] [--tokens 128] [--repeats 3] [--json FILE]

Prints a table, then one JSON line. Decoding only: each figure is (tokens - 1) / (time from the first to the last token).
Each prompt's three methods run in turn, `--repeats` times; the medians are shown. Tokens are compared, never assumed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch
import transformers
from rich.console import Console
from rich.table import Table

from specdec import LLM, SamplingParams, __version__

TEXT = (
    "The harbour master keeps a ledger of every vessel that enters the bay. Each morning he writes the name of the ship, "
    "the flag it flies, the cargo it carries and the pier where it is moored. In the evening he reads the ledger aloud to "
    "the night watch, who repeats each line so that nothing is lost. On the first of the month the ledger is copied in "
    "full and the copy is sent to the capital."
)
CODE = """def total_price(items, tax_rate):
    subtotal = 0
    for item in items:
        subtotal = subtotal + item.price * item.quantity
    tax = subtotal * tax_rate
    return subtotal + tax

def print_invoice(items, tax_rate):
    for item in items:
        print(item.name, item.quantity, item.price)
    print("Total:", total_price(items, tax_rate))
"""
PROMPTS = {
    "copy text": f"Copy the following text word for word.\n\n{TEXT}",
    "copy code": f"Write out this code again without any change:\n\n{CODE}",
    "edit code": f"Rename `tax_rate` to `rate` and write the whole code again:\n\n{CODE}",
    "repeat": f"{TEXT}\n\nRepeat the text above twice.",
    "list": "Count from 1 to 60, one number on each line, each written as: number N.",
    "chat": "What should I look for when I buy a used bicycle?",
    "story": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "maths": "A train travels 120 km in 1.5 hours. How far does it travel in 4 hours? Explain step by step.",
}
COPY_HEAVY = 0.5
"""A prompt is copy-heavy if so much of the answer repeats: tokens that end a run of four that stood before."""


class FirstAndLast:
    """A transformers streamer that notes when tokens come."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def transformers_rate(llm: LLM, ids: list[int], tokens: int) -> tuple[float, list[int]]:
    clock = FirstAndLast()
    inputs = torch.tensor([ids], device=llm.model.device)
    out = llm.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False, streamer=clock
    )
    times = clock.times[1:]  # the first call is the prompt
    return (len(times) - 1) / (times[-1] - times[0]), out[0, len(ids) :].tolist()


def our_rate(llm: LLM, ids: list[int], tokens: int, k: int | None) -> tuple[float, list[int], float]:
    out = llm.generate(ids, SamplingParams(max_tokens=tokens, temperature=0.0, k=k))[0]
    return out.stats.decode_tokens_per_s, out.token_ids, out.stats.acceptance_length


def repeated(prompt: list[int], answer: list[int]) -> float:
    """The share of the answer's tokens that end a run of four tokens which stood before, in prompt or answer."""
    tokens, seen, found = prompt + answer, set(), 0
    for end in range(4, len(tokens) + 1):
        run = tuple(tokens[end - 4 : end])
        found += end > len(prompt) and run in seen
        seen.add(run)
    return found / len(answer)


def measure(llm: LLM, ids: list[int], tokens: int, repeats: int) -> dict:
    rates: dict[str, list[float]] = {"transformers": [], "plain": [], "lookup": []}
    outputs: dict[str, list[int]] = {}
    length = 0.0
    for _ in range(repeats):
        rate, outputs["transformers"] = transformers_rate(llm, ids, tokens)
        rates["transformers"].append(rate)
        rate, outputs["plain"], _ = our_rate(llm, ids, tokens, 0)
        rates["plain"].append(rate)
        rate, outputs["lookup"], length = our_rate(llm, ids, tokens, None)
        rates["lookup"].append(rate)
        llm.reset_prefix_cache()
    row = {name: statistics.median(values) for name, values in rates.items()}
    row["spread"] = max((max(v) - min(v)) / statistics.median(v) for v in rates.values())
    row["acceptance_length"] = length
    row["repeated"] = repeated(ids, outputs["plain"])
    row["identical"] = {name: outputs[name] == outputs["transformers"] for name in ("plain", "lookup")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = {}
    with LLM(args.model, drafter="lookup") as llm:
        measure(llm, llm.chat_ids([{"role": "user", "content": "Hello"}]), 8, 1)
        for name, prompt in PROMPTS.items():
            ids = llm.chat_ids([{"role": "user", "content": prompt}])
            rows[name] = measure(llm, ids, args.tokens, args.repeats)
        device = llm.model.device
    show(rows)
    result = {
        "command": f"scripts/bench_cpu.py --model {args.model} --tokens {args.tokens} --repeats {args.repeats}",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"specdec": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
    }
    line = json.dumps(result)
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")


def show(rows: dict[str, dict]) -> None:
    table = Table(
        "prompt", "transformers tok/s", "plain tok/s", "look-up tok/s", "look-up / plain", "acceptance length"
    )
    table.add_column("repeated")
    table.add_column("spread")
    table.add_column("tokens as transformers'")
    for name, r in rows.items():
        label = f"{name} *" if r["repeated"] >= COPY_HEAVY else name
        same = "identical" if all(r["identical"].values()) else str(r["identical"])
        table.add_row(
            label,
            f"{r['transformers']:.1f}",
            f"{r['plain']:.1f}",
            f"{r['lookup']:.1f}",
            f"{r['lookup'] / r['plain']:.2f}",
            f"{r['acceptance_length']:.2f}",
            f"{100 * r['repeated']:.0f} %",
            f"{100 * r['spread']:.0f} %",
            same,
        )
    Console().print(table)
    print(
        "* copy-heavy: at least half of the answer repeats. acceptance length: tokens per round, bonus token included."
    )


if __name__ == "__main__":
    main()
