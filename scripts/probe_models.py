"""docs/models.md: every causal LM class of the installed transformers, and how specdec runs it. A minute or two on a CPU.

    python scripts/probe_models.py            # print the table
    python scripts/probe_models.py --write    # ... into docs/models.md
    python scripts/probe_models.py llama falcon

Each is probed with its default config, shrunk, as `LLM` and `specdec.hf.enable` do with the config of the model they get.
"""

from __future__ import annotations

import argparse
import logging
import signal
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specdec.model.probe import ROUTE_NAMES, refuse_stateful, small_model, try_routes

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SECONDS = 30
REFUSED, UNTRIED = "refused", "not tried"


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    model_type: str
    cls: str
    runs: str
    why: str


def probe(config_class: type, cls: type) -> Row:
    """What becomes of one entry of the mapping."""
    name = config_class.model_type

    def row(runs: str, why: object = "") -> Row:
        text = " ".join(str(why).split()).replace("|", "/").removeprefix(f"model: {cls.__name__} can't be paged: ")
        return Row(name, cls.__name__, runs, text if len(text) <= 160 else text[:157] + "...")

    try:
        config = config_class()
        if cls.config_class is config.sub_configs.get("text_config"):
            config = config.get_text_config()
        if getattr(config, "is_decoder", None) is False:
            config.is_decoder = True
    except Exception as error:
        return row(UNTRIED, f"its default config is refused: {error!r}")
    try:
        refuse_stateful(cls, config)
    except ValueError as error:
        return row(REFUSED, error)
    try:
        model = small_model(cls, config)
    except Exception as error:
        return row(UNTRIED, f"no small model of it could be made: {error!r}")
    verdict = try_routes(model)
    why = "; ".join(verdict.reasons).replace(cls.__name__, "it")
    return row(REFUSED if verdict.route is None else ROUTE_NAMES[verdict.route], why)


def page(rows: list[Row]) -> str:
    """docs/models.md."""
    counts = Counter(row.runs for row in rows)
    runs = sum(counts[name] for name in ROUTE_NAMES)
    named = ", ".join(f"{counts[name]} {name}" for name in (*ROUTE_NAMES, REFUSED, UNTRIED))
    lines = [
        _INTRODUCTION.format(
            version=transformers.__version__, torch=torch.__version__, runs=runs, all=len(rows), named=named
        ),
        "| model_type | class | runs | why not faster, or not at all |",
        "|---|---|---|---|",
        *(f"| {row.model_type} | {row.cls} | {row.runs} | {row.why} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
# Models

Written by `scripts/probe_models.py --write` (transformers {version}, torch {torch}, CPU, fp32): all of transformers' causal
LM classes, each with its default config shrunk to some ten thousand weights. A model runs if its logits on blocks are its
own within 3e-4 of the largest, over ragged prompts, several new tokens a sequence and a roll-back, with windows shorter than
the text. **{runs} of {all} run**: {named}.

The same probe runs once for each architecture when an `LLM` is built or a model is enabled, on its own config. What it finds
wrong is refused with the reason, so a class that transformers gains tomorrow either works or says why not.

- **paged**: attention by specdec's kernel, through transformers' `AttentionInterface`. Full speed.
- **gathered**: the model's own attention. A `Cache` stores into the blocks and copies each sequence's context out of them,
  padded to the longest: a copy of the context in every layer, no CUDA graphs, no compiled layers. A warning says so.
- **gathered apart**: the same, but only sequences of equal lengths share a forward, because the model counts
  positions for a whole batch.
- **refused**: state that is not KV (recurrent, convolution, linear attention, the index of sparse attention), or logits that
  differ.
- **not tried**: the default config makes no model, or no small one. A real config is probed when it is loaded.

A row is about the default config: layers of another kind in a real one (`lfm2` with convolutions) are refused by their
`layer_types`. Sliding windows, chunks, soft caps, sinks, ALiBi, latent attention (decompressed), K and V of different sizes,
layers of different head sizes, looped layers and mixtures of experts are all among the classes that run.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_types", nargs="*", help="only these")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _late)
    rows = []
    for config_class, cls in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        if not options.model_types or config_class.model_type in options.model_types:
            signal.alarm(SECONDS)
            rows.append(probe(config_class, cls))
            signal.alarm(0)
    text = page(sorted(rows, key=lambda row: row.model_type))
    if options.write:
        PAGE.write_text(text)
    else:
        print(text)


def _late(*_: object) -> None:
    raise TimeoutError(f"not done after {SECONDS} s")


if __name__ == "__main__":
    main()
