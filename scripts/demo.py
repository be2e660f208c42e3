"""Generate for a handful of varied prompts, plainly and speculatively, and compare speed and tokens.

Plain is the same engine without drafts (k = 0). Both runs find the prompt's KV cached, so the rates are of decoding;
seconds run from the submission to the last token. Greedy, one prompt at a time, one run each.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec import LLM, Output, SamplingParams

CONTRACT = (
    "The tenant shall pay the monthly rent of 840 euros on or before the third working day of each month. "
    "The tenant shall keep the rooms clean and shall report any damage to the landlord within five days. "
    "The landlord shall repair the heating, the windows and the roof at his own cost. Either party may end this "
    "agreement by a letter that arrives at least three months before the end of a quarter."
)
CODE = """def area(width, height):
    return width * height

def perimeter(width, height):
    return 2 * (width + height)

print(area(3, 4))
print(perimeter(3, 4))
"""
ARTICLE = (
    "Lighthouses were once kept by people who lived beside the lamp. They trimmed the wick, wound the clockwork that "
    "turned the lens, and wrote the weather into a book every three hours. In the 1960s the first lamps were "
    "switched by a light sensor, and by the end of the century nearly every lighthouse in Europe worked without a "
    "keeper. Many of the houses are now museums or small hotels, and the old logbooks help to study how the climate "
    "of the coast has changed."
)
MISSPELT = ARTICLE.replace("people", "poeple").replace("weather", "wether").replace("century", "centrury")
PROMPTS = {
    "chat": "Why is the sky blue? Explain it to a ten-year-old.",
    "story": "Write the beginning of a story about a clockmaker who finds a clock that runs backwards.",
    "summarise": f"Summarise this text.\n\n{ARTICLE}",
    "correct": f"Fix the spelling mistakes in this text and change nothing else.\n\n{MISSPELT}",
    "edit code": f"Add a function volume(width, height, depth) to this code:\n\n```python\n{CODE}```",
    "repeat": f"Repeat the following text word for word.\n\n{CONTRACT}",
}


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded twice."""

    name: str
    plain: Output
    speculative: Output
    verdict: str


def main() -> None:
    options = arguments()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("specdec").setLevel(logging.INFO)  # says so when a model has to be converted first
    console = Console(highlight=False)
    try:
        with LLM(options.model, drafter=options.drafter, device=options.device, dtype=options.dtype) as llm:
            console.print(f"[bold]{options.model}[/], drafter {options.drafter}, k {llm.k}, {hardware(llm)}\n")
            comparisons = [compare(llm, name, prompt, options.max_tokens, console) for name, prompt in PROMPTS.items()]
    except (ValueError, RuntimeError) as error:
        sys.exit(f"demo: {' '.join(str(error).split())}")
    console.print(table(comparisons))
    console.print("Acceptance length: tokens emitted per round, the bonus token included; plain decoding has 1.")
    if options.drafter == "lookup":
        console.print("Look-up gains where an answer repeats its prompt or itself, and little elsewhere.")
    if "VIRTUAL_ENV" not in os.environ and sys.prefix != sys.base_prefix:
        activate = Path(os.path.relpath(sys.prefix)) / "bin" / "activate"
        console.print(f'To go on: source {activate}; specdec generate {options.model} "Why is the sky blue?"')


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id, folder or .gguf file")
    parser.add_argument("--drafter", default="lookup", help="lookup or a model")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt at most")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args()


def hardware(llm: LLM) -> str:
    device = llm.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{str(llm.model.dtype).removeprefix('torch.')} on {name}"


def compare(llm: LLM, name: str, prompt: str, max_tokens: int, console: Console) -> Comparison:
    """Decode one prompt without and with drafts; the text shown is that of the run with drafts, as it comes."""
    ids = llm.chat_ids([{"role": "user", "content": prompt}])
    llm.generate(ids, SamplingParams(max_tokens=2, temperature=0))  # its KV is cached from here on, kernels are ready
    plain = llm.generate(ids, SamplingParams(max_tokens=max_tokens, temperature=0, k=0))[0]
    console.rule(f"[bold]{name}[/]", align="left")
    console.print(Text(prompt + "\n", style="dim"))
    handle = llm.submit(ids, SamplingParams(max_tokens=max_tokens, temperature=0))
    for piece in handle:
        console.print(piece.text, end="", markup=False, soft_wrap=True)
    console.print("\n")
    speculative = handle.result()
    return Comparison(name, plain, speculative, verdict(llm, plain, speculative))


def verdict(llm: LLM, plain: Output, speculative: Output) -> str:
    """Whether the tokens are the same, else where they part and how close the two were in an ordinary forward."""
    pairs = list(zip(plain.token_ids, speculative.token_ids, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        same = len(plain.token_ids) == len(speculative.token_ids)
        return "identical to plain" if same else f"differs at token {len(pairs)}, where one of them ends"
    ids = torch.tensor([plain.prompt_token_ids + plain.token_ids[:at]], device=llm.model.device)
    with torch.inference_mode():
        logits = llm.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    a, b = pairs[at]
    return f"differs at token {at}, margin {abs(float(logits[a] - logits[b])):.3g}"


def rate(output: Output) -> float:
    """Tokens per second, from the submission to the last token."""
    stats = output.stats
    return stats.num_tokens / ((stats.time_to_first_token_s or 0.0) + stats.decode_s)


def table(comparisons: list[Comparison]) -> Table:
    headings = ("prompt", "tokens", "plain\ntok/s", "speculative\ntok/s", "ratio", "acceptance\nlength", "text")
    result = Table(*headings, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in result.columns[:6]:
        column.no_wrap = True  # where the terminal is narrow, the verdict is what wraps
    for column in result.columns[1:6]:
        column.justify = "right"
    for one in comparisons:
        plain, speculative = rate(one.plain), rate(one.speculative)
        result.add_row(
            one.name,
            str(one.speculative.stats.num_tokens),
            f"{plain:.1f}",
            f"{speculative:.1f}",
            f"{speculative / plain:.2f}",
            f"{one.speculative.stats.acceptance_length:.2f}",
            one.verdict,
        )
    return result


if __name__ == "__main__":
    main()
