"""What a benchmark is asked for, checked before anything is loaded. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.sampling import MOST_DRAFTS, SamplingParams

METHODS = ("plain", "lookup", "draft")
VERIFIERS = ("coupled", "rejection", "block")
MOST_ROWS, MOST_PROMPTS = 4096, 1 << 17
"""Requests at once, prompts and tokens of one that arrives: more is taken for a slip, which would run for days."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "fp8")
LENGTHS = "input-len, context"
"""Two options that say the same."""


@dataclass(frozen=True)
class Settings:
    """One benchmark. Raises ValueError naming the option for what does not fit together.

    target, drafter: models as LLM takes them, or with random_weights named shapes or config files.
    methods: of METHODS; plain always runs, it is the baseline. batch: requests at once, one measurement each.
    verifier: of VERIFIERS; it decides what is accepted where requests sample.
    k: drafts per row and round, "auto" for what pays. temperatures: 0 is greedy.
    prompts: a file, None for the set that ships. input_lens: random tokens instead, of these lengths.
    output_len: tokens per request at most; exactly, with ignore_eos. limit: the first so many prompts only;
    None is all, but on a CPU one of each task of the set that ships, and of random tokens one batch of each size.
    runs: measured repetitions, after a warm-up.
    acceptance_length: force it ("controlled acceptance"), at a k that is too small for it k + 1.
    mixed_len: also measure mixed load, with prompts of so many random tokens arriving while a batch runs.
    against: also measure transformers' generate. latency_target_ms: per token, for goodput.
    prompt_budget, graphs, compile, dtype, device, kv_dtype, kv_scales: as LLM has them, the last one a file.
    """

    target: str
    drafter: str | None = None
    methods: tuple[str, ...] = ("plain", "lookup")
    batch: tuple[int, ...] = (1,)
    k: tuple[int | str, ...] = ("auto",)
    verifier: str = "coupled"
    temperatures: tuple[float, ...] = (0.0,)
    prompts: Path | None = None
    input_lens: tuple[int, ...] = ()
    output_len: int = 128
    limit: int | None = None
    runs: int = 3
    acceptance_length: float | None = None
    random_weights: bool = False
    mixed_len: int | None = None
    against: bool = False
    ignore_eos: bool = False
    latency_target_ms: float = 50.0
    prompt_budget: int = 512
    graphs: bool | str = "auto"
    compile: bool | str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kv_scales: Path | None = None
    device: str = "auto"
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ValueError(f"methods: expected some of {', '.join(METHODS)}, got {method!r}")
        known = {"dtype": DTYPES, "kv_dtype": KV_DTYPES, "verifier": VERIFIERS}
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name.replace('_', '-')}: expected one of {', '.join(values)}, got {value!r}")
        _within("batch", self.batch, 1, MOST_ROWS)
        _within(LENGTHS, self.input_lens, 1)
        _within("k", [k for k in self.k if k != "auto"], 1, MOST_DRAFTS)
        _within("output-len", [self.output_len], 2)  # one token has no latency between tokens
        _within("runs", [self.runs], 1)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        _within("prompt-budget", [self.prompt_budget], 1)
        for name, count in (("limit", self.limit), ("mixed", self.mixed_len)):
            _within(name, [] if count is None else [count], 1, MOST_PROMPTS)
        if not 0 < self.latency_target_ms < float("inf"):
            raise ValueError(f"latency-target: expected milliseconds above 0, got {self.latency_target_ms:g}")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if "draft" in self.methods and self.drafter is None:
            raise ValueError("methods: draft needs --drafter MODEL")
        if self.drafter == "lookup":
            raise ValueError(
                "drafter: expected a model; look-up is a method, and on by default: --methods plain,lookup"
            )
        if self.drafter is not None and "draft" not in self.methods:
            raise ValueError("drafter: it is not used; add draft to --methods")
        if self.kv_scales is not None and self.kv_dtype != "fp8":
            raise ValueError("kv-scales: they are those of KV in fp8; give --kv-dtype fp8 beside them")
        if self.prompts is not None and self.input_lens:
            raise ValueError("prompts: random tokens (--input-len, --context) and a file of prompts exclude each other")
        if self.random_weights and not self.input_lens:
            raise ValueError("random-weights: such a model has no tokenizer; give --input-len or --context")
        if self.against and self.acceptance_length is not None:
            raise ValueError("against: transformers' acceptance cannot be controlled; drop --synthetic-acceptance")
        if self.acceptance_length is not None and self.verifier != "coupled":
            raise ValueError("verifier: --synthetic-acceptance overrules it; give one of them")
        if self.acceptance_length is not None:
            high = max((k for k in self.k if isinstance(k, int)), default=4) + 1
            if not 1 <= self.acceptance_length <= high:
                raise ValueError(f"synthetic-acceptance: expected 1 to {high} (k + 1), got {self.acceptance_length:g}")

    @property
    def label(self) -> str | None:
        """What every figure must be labelled with, None for measured acceptance."""
        return None if self.acceptance_length is None else f"controlled acceptance {self.acceptance_length:g}"


def numbers(name: str, text: str) -> tuple[int, ...]:
    """ "1,4,16" or "1k,8k" as numbers, k standing for 1,024. Raises ValueError naming the option."""
    found = []
    for part in text.split(","):
        part = part.strip().lower()
        digits, unit = (part[:-1], 1024) if part.endswith("k") else (part, 1)
        if not digits.isdecimal():
            raise ValueError(f"{name}: expected numbers such as 1,4,16 or 1k,8k, got {text!r}")
        found.append(int(digits) * unit)
    return tuple(dict.fromkeys(found))


def names(text: str) -> tuple[str, ...]:
    """ "plain,lookup" as words, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def depths(text: str) -> tuple[int | str, ...]:
    """ "1,2,auto" as numbers of drafts. Raises ValueError naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if any(part != "auto" and not part.isdecimal() for part in parts):
        raise ValueError(f"k: expected auto or numbers such as 1,2,4, got {text!r}")
    return tuple(dict.fromkeys(part if part == "auto" else int(part) for part in parts))


def reals(name: str, text: str) -> tuple[float, ...]:
    """ "0,0.7" as floats. Raises ValueError naming the option."""
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{name}: expected numbers such as 0,1, got {text!r}") from None


def _within(name: str, values: Any, low: int, high: float = float("inf")) -> None:
    """Finite numbers from `low` to `high`."""
    for value in values:
        if not low <= value < float("inf"):
            raise ValueError(f"{name}: expected at least {low}, got {value}")
        if value > high:
            raise ValueError(f"{name}: expected at most {high}, got {value}")
