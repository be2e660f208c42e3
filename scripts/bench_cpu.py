"""Plain decoding, look-up drafting and transformers `generate` on real prompts, one after another in one run.

    python scripts/bench_cpu.py [--model smollm2-135m] [--tokens 128] [--repeats 3] [--json FILE]
    python scripts/bench_cpu.py --hf [--k 10] [...]

Prints a table, then one JSON line. Decoding only: each figure is (tokens - 1) / (time from the first to the last token).
Each prompt's three methods run in turn, `--repeats` times; the medians are shown. Tokens are compared, never assumed.

--hf: batches of four prompts through `model.generate` with look-up (`prompt_lookup_num_tokens`): the enabled model beside
transformers, which decodes a batch only without look-up and with it only one prompt after another. Seconds of whole calls,
prompts included. The ratio is the median over the repeats of (the faster of transformers' two) / (the enabled model); the
ratio of CPU time is for a machine that is shared (with OMP_WAIT_POLICY=passive, or waiting counts).
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time

import torch
import transformers
from rich.console import Console
from rich.table import Table

import specdec.hf
from specdec import LLM, SamplingParams, __version__
from specdec.loading import Loaded, load_model

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
TEXTS = [
    TEXT,
    "The baker rises at three and lights the oven with dry beech wood. While it warms she weighs the flour, the salt and the "
    "water, and sets the dough beside the stove. At six the first loaves go to the inn, at seven to the school, and what is "
    "left is sold at the door before noon.",
    "Our observatory records the height of the river every quarter of an hour. A float in a stone well moves a pen over a "
    "paper drum, and on Mondays the paper is changed. The old sheets are kept in the attic, tied by year, and the oldest of "
    "them is from the great flood.",
    "To mend the clock, first remove the glass and the two hands. Loosen the three screws at the back, lift the plate and "
    "take out the spring. Clean every wheel with a soft brush, oil the pivots with one drop each, and put the parts back in "
    "the reverse order.",
]
CODE_TASKS = [
    "Write out this code again without any change",
    "Rename `tax_rate` to `rate` and write the whole code again",
    "Add a docstring to each function and write the whole code again",
    "Rename `items` to `lines` and write the whole code again",
]
BATCHES = {
    "copy": [f"Copy the following text word for word.\n\n{text}" for text in TEXTS],
    "repeat": [f"{text}\n\nRepeat the text above twice." for text in TEXTS],
    "code": [f"{task}:\n\n{CODE}" for task in CODE_TASKS],
}
NOTE = "* copy-heavy: at least half of the answer repeats. acceptance length: tokens per round, bonus token included."
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


class Batch:
    """Four prompts for `generate`, left-padded, and each alone."""

    def __init__(self, loaded: Loaded, prompts: list[str], tokens: int):
        texts = (
            loaded.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            for prompt in prompts
        )
        self.prompts = [loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self.arguments = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        self.ends = _ids(loaded.model.generation_config.eos_token_id)

    def generate(self, model: transformers.PreTrainedModel, **arguments: int) -> list[list[int]]:
        """The answers of all rows, by one call."""
        width = max(map(len, self.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in self.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in self.prompts])
        out = model.generate(ids, attention_mask=mask, **self.arguments, **arguments)
        return [self._answer(row[width:]) for row in out.tolist()]

    def generate_in_turn(self, model: transformers.PreTrainedModel, **arguments: int) -> list[list[int]]:
        """The same, a call for each row."""
        outs = []
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **self.arguments, **arguments)
            outs.append(self._answer(out[0, len(prompt) :].tolist()))
        return outs

    def _answer(self, tokens: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tokens[:end]


def _ids(eos: int | list[int] | None) -> list[int]:
    return [] if eos is None else [eos] if isinstance(eos, int) else eos


def measure_batch(own: transformers.PreTrainedModel, enabled: specdec.hf.Enabled, batch: Batch, args) -> dict:
    """Whole calls of three methods in turn. own: a copy of the model that is not enabled."""
    look_up = {"prompt_lookup_num_tokens": args.k}
    methods = {
        "transformers": lambda: batch.generate(own),
        "in turn": lambda: batch.generate_in_turn(own, **look_up),
        "plug-in": lambda: batch.generate(enabled.model, **look_up),
    }
    outputs = {"plug-in": methods["plug-in"]()}  # builds its engine
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    cpu: dict[str, list[float]] = {name: [] for name in methods}
    before = enabled.stats.emitted, enabled.stats.row_rounds
    for _ in range(args.repeats):
        for name, method in methods.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            outputs[name] = method()
            seconds[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    emitted, rounds = enabled.stats.emitted - before[0], enabled.stats.row_rounds - before[1]
    shares = [repeated(p, answer) for p, answer in zip(batch.prompts, outputs["transformers"], strict=True)]
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": _ratio(*seconds.values()),
        "ratio_cpu": _ratio(*cpu.values()),
        "acceptance_length": emitted / rounds,
        "repeated": statistics.mean(shares),
        "identical": {name: outputs[name] == outputs["transformers"] for name in list(methods)[1:]},
    }


def _ratio(theirs: list[float], in_turn: list[float], ours: list[float]) -> float:
    return statistics.median(min(a, b) / c for a, b, c in zip(theirs, in_turn, ours, strict=True))


def batches(args: argparse.Namespace) -> dict[str, dict]:
    loaded = load_model(args.model, dtype="float32", device="cpu")
    own, rows = copy.deepcopy(loaded.model), {}
    with specdec.hf.enable(loaded.model) as enabled:
        for name, prompts in BATCHES.items():
            rows[name] = measure_batch(own, enabled, Batch(loaded, prompts, args.tokens), args)
            print(name, rows[name], flush=True)
    table = Table(
        "batch of 4",
        *next(iter(rows.values()))["seconds"],
        "ratio",
        "of CPU time",
        "acceptance length",
        "repeated",
        "tokens",
    )
    for name, r in rows.items():
        label = f"{name} *" if r["repeated"] >= COPY_HEAVY else name
        same = "identical" if all(r["identical"].values()) else str(r["identical"])
        seconds = (f"{value:.2f} s" for value in r["seconds"].values())
        length, share = f"{r['acceptance_length']:.2f}", f"{100 * r['repeated']:.0f} %"
        table.add_row(label, *seconds, f"{r['ratio']:.2f}", f"{r['ratio_cpu']:.2f}", length, share, same)
    Console().print(table)
    print(NOTE)
    return rows


def prompts(args: argparse.Namespace) -> dict[str, dict]:
    rows = {}
    with LLM(args.model, drafter="lookup") as llm:
        measure(llm, llm.chat_ids([{"role": "user", "content": "Hello"}]), 8, 1)
        for name, prompt in PROMPTS.items():
            ids = llm.chat_ids([{"role": "user", "content": prompt}])
            rows[name] = measure(llm, ids, args.tokens, args.repeats)
    show(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hf", action="store_true", help="batches through model.generate")
    parser.add_argument("--k", type=int, default=10, help="prompt_lookup_num_tokens of --hf")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = batches(args) if args.hf else prompts(args)
    kind = f" --hf --k {args.k}" if args.hf else ""
    result = {
        "command": f"scripts/bench_cpu.py --model {args.model} --tokens {args.tokens} --repeats {args.repeats}{kind}",
        "device": platform.processor() or platform.machine()
        if args.hf or not torch.cuda.is_available()
        else torch.cuda.get_device_name(),
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
    print(NOTE)


if __name__ == "__main__":
    main()
