"""What a request asks for: `SamplingParams`, its defaults and its checks. Host only; `kernels.sample` draws."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from typing import Any

_MASK64 = (1 << 64) - 1

MOST_DRAFTS = 1024
"""Drafts per row and round that may be asked for: every row of a round has room for so many."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. `None` means: what the model's generation config says, else the neutral value.

    max_tokens: tokens to emit at most (>= 1), cut further by the model's last position.
    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k, top_p, min_p: filters, applied in this order after the temperature; 0, 1.0 and 0.0 turn them off.
    seed: 64 bits; `None` draws fresh ones, returned with the output. Sample i of n uses `sample_seed(seed, i)`.
    n: samples per prompt. They share the KV of the prompt.
    stop: strings that end the text (left out of it); stop_token_ids: ids that end it (kept in `token_ids`).
    ignore_eos: decode past the model's end token. k: drafted tokens per round at most, `None` for the engine's own.
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    k: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if not isinstance(value, (list, tuple, str)) or (name == "stop_token_ids" and isinstance(value, str)):
                raise TypeError(f"{name}: expected a list or a tuple, got {type(value).__name__} {value!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        check_int("max_tokens", self.max_tokens, 1)
        check_int("n", self.n, 1)
        check_int("top_k", self.top_k, 0, (1 << 31) - 1)
        check_int("k", self.k, 0, MOST_DRAFTS)
        check_int("seed", self.seed, -(1 << 63), _MASK64)
        _check_real("temperature", self.temperature, 0.0, 1e30)
        _check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop: expected non-empty strings, got {text!r}")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0, (1 << 63) - 1)

    def resolve(self, generation_config: Any, seed: int | None = None) -> SamplingParams:
        """The same parameters with every `None` but `k` filled from `generation_config` (a transformers one, or None).

        A config that does not sample (`do_sample` false) means temperature 0, whatever else it carries. `seed` is
        the engine's own seed for requests that give none; without it 64 fresh bits are drawn.
        """
        config = generation_config
        sampled = bool(getattr(config, "do_sample", False))

        def default(name: str, neutral: float) -> Any:
            value = getattr(config, name, None) if sampled else None
            return neutral if value is None else value

        temperature = default("temperature", 1.0) if sampled else 0.0
        return replace(
            self,
            temperature=float(temperature if self.temperature is None else self.temperature),
            top_k=int(default("top_k", 0) if self.top_k is None else self.top_k),
            top_p=float(default("top_p", 1.0) if self.top_p is None else self.top_p),
            min_p=float(default("min_p", 0.0) if self.min_p is None else self.min_p),
            seed=self.seed if self.seed is not None else seed if seed is not None else secrets.randbits(64),
        )

    @property
    def noise(self) -> bool:
        """Whether drawing needs noise at all (resolved parameters)."""
        return bool(self.temperature)

    @property
    def filters(self) -> bool:
        """Whether any filter can remove a token (resolved parameters). Greedy drawing needs none."""
        return self.noise and bool(self.top_k or (self.top_p or 1.0) < 1.0 or self.min_p)


def sample_seed(seed: int, index: int) -> int:
    """The 64-bit seed of sample `index`, as a signed integer for an int64 tensor. Sample 0 keeps `seed` itself.

    Later samples take the splitmix64 finaliser (Steele, Lea, Flood 2014) of seed + index * golden ratio.
    """
    x = seed & _MASK64
    if index:
        x = (x + index * 0x9E3779B97F4A7C15) & _MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
        x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise TypeError or ValueError, naming the argument, unless `value` is an int of low to high (None: no bound)."""
    if value is None and name in ("top_k", "k", "seed", "lag"):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(
            f"{name}: expected {f'{low} to {high}' if high is not None else f'at least {low}'}, got {value}"
        )


def _check_real(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} {value!r}")
    if not (low < value if open_low else low <= value) or not value <= high or math.isinf(value):
        bound = f"{'more than' if open_low else 'at least'} {low:g}" + (
            f" and at most {high:g}" if high < math.inf else ""
        )
        raise ValueError(f"{name}: expected {bound}, got {value}")
