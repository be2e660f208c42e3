"""What a request asks for: `SamplingParams`, its defaults and its checks. Host only; `kernels` adjust logits and draw."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from specdec.shown import shown

_MASK64 = (1 << 64) - 1
_INT32 = (1 << 31) - 1

MOST_DRAFTS = 1024
MOST_SAMPLES = 1024
"""Of one request: each is a sequence of its own from the start."""
"""Drafts per row and round that may be asked for: every row of a round has room for so many."""

MOST_LOGPROBS = 20
"""Likeliest tokens that may be asked for beside each token."""

GRAMMARS = ("json_schema", "regex", "grammar")
"""Parameters that an output can be held to, one at a time."""

MOST_BANS, BAN_LENGTH = 256, 16
"""Bad words of several tokens, with the ids that min_tokens holds back, that a row has room for; tokens of such a word."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "sequence_bias": (),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "watermarking_config": (),
    "max_time": (),
}
"""What a generation config may say that is not done here, each with the values that ask for nothing, None besides."""

_REFUSED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
"""The same, where the config samples."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. `None` means: what the model's generation config says, else the neutral value.

    max_tokens: tokens to emit at most (>= 1), cut further by the model's last position.
    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k, top_p, min_p: filters, applied in this order after the temperature; 0, 1.0 and 0.0 turn them off.
    seed: 64 bits; `None` draws fresh ones, returned with the output. Sample i of n uses `sample_seed(seed, i)`. The tokens are
    a function of it, whatever is drafted; with the verifiers "rejection" and "block" of the drafts as well, so fix k.
    n: samples per prompt. They share the KV of the prompt.
    stop: strings that end the text (left out of it); stop_token_ids: ids that end it (kept in `token_ids`).
    ignore_eos: decode past the model's end token. k: drafted tokens per round at most, `None` for the engine's own.

    Before the temperature, in this order (docs/sampling.md):
    repetition_penalty: logits above 0 of tokens in prompt or output are divided by it, others multiplied; 1.0 is off.
    frequency_penalty, presence_penalty: taken off for each time, and once, that a token is in the output; 0.0 is off.
    logit_bias: {token id: what is added}; -inf forbids the token.
    allowed_token_ids: nothing else is drawn. bad_words: strings, or lists of token ids, that are not completed.
    min_tokens: tokens to emit before the end token or one of stop_token_ids may be drawn.

    logits_processors: of transformers, or callables like them: (input_ids [1, L], scores [1, V]) -> scores [1, V], called
    for each position with the tokens before it, after all that is above and before the temperature. They are asked about
    drafts that may be rejected, so scores must be a function of the arguments. Such a request's rounds are not captured.
    json_schema (a dict or its text), regex, grammar (Lark, as llguidance has it): at most one, which the output must
    follow; its end token may be drawn where the output may end.

    logprobs: return each token's log-probability and those of the so many likeliest ones (0: the token's alone), of the
    model's own logits, or with processed_logprobs of what was drawn from. prompt_logprobs: the same for the prompt.

    Raises TypeError or ValueError naming the parameter.
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    k: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] | None = None
    min_tokens: int | None = None
    logits_processors: tuple[Callable[[Any, Any], Any], ...] = ()
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    logprobs: int | None = None
    processed_logprobs: bool = False
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._freeze()
        check_int("max_tokens", self.max_tokens, 1)
        check_int("n", self.n, 1, MOST_SAMPLES)
        check_int("top_k", self.top_k, 0, _INT32)
        check_int("k", self.k, 0, MOST_DRAFTS)
        check_int("seed", self.seed, -(1 << 63), _MASK64)
        _check_real("temperature", self.temperature, 0.0, 1e30)
        _check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, 1e4, open_low=True)
        _check_real("presence_penalty", self.presence_penalty, -1e4, 1e4, optional=False)
        _check_real("frequency_penalty", self.frequency_penalty, -1e4, 1e4, optional=False)
        check_int("min_tokens", self.min_tokens, 0)
        check_int("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        check_int("prompt_logprobs", self.prompt_logprobs, 0, MOST_LOGPROBS)
        for name in ("ignore_eos", "processed_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, got {type(getattr(self, name)).__name__}")
        for text in self.stop or ():
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop: expected non-empty strings, got {shown(text)}")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0, (1 << 63) - 1)
        if self.min_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: expected at most max_tokens, {shown(self.max_tokens)}, got {shown(self.min_tokens)}"
            )
        if self.processed_logprobs and self.logprobs is None:
            raise ValueError("processed_logprobs: expected logprobs with it, got None")
        self._check_tokens()
        self._check_processors()

    def _freeze(self) -> None:
        """Lists become tuples and dicts pairs, so that parameters can't change while they are in use."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logits_processors"):
            value = getattr(self, name)
            if value is None and name not in ("stop_token_ids", "logits_processors"):
                continue
            if not isinstance(value, (list, tuple)):
                raise TypeError(f"{name}: expected a list or a tuple, got {type(value).__name__} {shown(value)}")
            object.__setattr__(self, name, tuple(tuple(v) if isinstance(v, (list, tuple)) else v for v in value))
        bias = self.logit_bias
        if not isinstance(bias, (Mapping, tuple)):
            raise TypeError(
                f"logit_bias: expected a dict of token ids and numbers, got {type(bias).__name__} {shown(bias)}"
            )
        object.__setattr__(self, "logit_bias", tuple(bias.items()) if isinstance(bias, Mapping) else bias)

    @property
    def biased_tokens(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as it is kept, pairs of a token id and what is added."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    def _check_tokens(self) -> None:
        for pair in self.biased_tokens:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"logit_bias: expected pairs of a token id and a number, got {shown(pair)}")
            check_int("logit_bias", pair[0], 0, _INT32)
            if pair[1] != -math.inf:
                _check_real("logit_bias", pair[1], -1e30, 1e30, optional=False)
        for token in self.allowed_token_ids or ():
            check_int("allowed_token_ids", token, 0, _INT32)
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids: expected at least one token id, got none; None allows all")
        for word in self.bad_words or ():
            if not isinstance(word, (str, tuple)):
                raise TypeError(
                    f"bad_words: expected strings or lists of token ids, got {type(word).__name__} {shown(word)}"
                )
            if not 0 < len(word) or (isinstance(word, tuple) and len(word) > BAN_LENGTH):
                raise ValueError(f"bad_words: expected 1 to {BAN_LENGTH} token ids each, got {shown(word)}")
            for token in word if isinstance(word, tuple) else ():
                check_int("bad_words", token, 0, _INT32)

    def _check_processors(self) -> None:
        for processor in self.logits_processors:
            if not callable(processor):
                raise TypeError(f"logits_processors: expected callables, got {type(processor).__name__}")
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        for name in given:
            if not isinstance(getattr(self, name), str):
                got = type(getattr(self, name)).__name__
                raise TypeError(f"{name}: expected a string{' or a dict' * (name == 'json_schema')}, got {got}")
        if len(given) > 1:
            raise ValueError(f"{given[1]}: expected at most one of {', '.join(GRAMMARS)}, got {' and '.join(given)}")

    def resolve(self, generation_config: Any, seed: int | None = None, *, prompt_len: int = 0) -> SamplingParams:
        """The same parameters with every `None` filled from `generation_config` (a transformers one, or None), but for
        `k`, `allowed_token_ids` and the log-probabilities, which it does not know.

        A config that does not sample (`do_sample` false) means temperature 0, whatever else it carries. `seed` is
        the engine's own seed for requests that give none; without it 64 fresh bits are drawn. prompt_len: tokens of
        the prompt, which `min_length` counts too.

        Raises ValueError naming what the config asks for and is not done here.
        """
        config = generation_config
        sampled = bool(getattr(config, "do_sample", False))
        refuse(config, {**_REFUSED, **(_REFUSED_SAMPLING if sampled else {})})

        def default(name: str, neutral: Any, only_sampled: bool = True) -> Any:
            value = getattr(config, name, None) if sampled or not only_sampled else None
            return neutral if value is None else value

        temperature = default("temperature", 1.0) if sampled else 0.0
        penalty = default("repetition_penalty", 1.0, False)
        shortest = max(default("min_new_tokens", 0, False), default("min_length", 0, False) - prompt_len)
        stop = default("stop_strings", (), False)
        return replace(
            self,
            temperature=float(temperature if self.temperature is None else self.temperature),
            top_k=int(default("top_k", 0) if self.top_k is None else self.top_k),
            top_p=float(default("top_p", 1.0) if self.top_p is None else self.top_p),
            min_p=float(default("min_p", 0.0) if self.min_p is None else self.min_p),
            seed=self.seed if self.seed is not None else seed if seed is not None else secrets.randbits(64),
            stop=stop if self.stop is None else self.stop,
            repetition_penalty=float(penalty if self.repetition_penalty is None else self.repetition_penalty),
            min_tokens=min(shortest, self.max_tokens) if self.min_tokens is None else self.min_tokens,
            bad_words=_bad_words(config) if self.bad_words is None else self.bad_words,
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError, naming the parameter, for a token id that the model can't draw."""
        tokens = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": [token for token, _ in self.biased_tokens],
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [token for word in self.bad_words or () if isinstance(word, tuple) for token in word],
        }
        for name, ids in tokens.items():
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(f"{name}: expected token ids in 0..{vocab_size - 1}, got {shown(token)}")

    @property
    def noise(self) -> bool:
        """Whether drawing needs noise at all (resolved parameters)."""
        return bool(self.temperature)

    @property
    def filters(self) -> bool:
        """Whether any filter can remove a token (resolved parameters). Greedy drawing needs none."""
        return self.noise and bool(self.top_k or (self.top_p or 1.0) < 1.0 or self.min_p)

    @property
    def structured(self) -> bool:
        """Whether the output must follow a grammar."""
        return any(getattr(self, name) is not None for name in GRAMMARS)

    @property
    def penalties(self) -> bool:
        """Whether logits depend on which tokens the row has, and how often."""
        return (self.repetition_penalty or 1.0) != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def biases(self) -> bool:
        """Whether something is added to logits, -inf where a token is forbidden, whatever the row holds."""
        return bool(self.logit_bias or self.allowed_token_ids or any(len(word) == 1 for word in self.bad_words or ()))

    @property
    def adjusted(self) -> bool:
        """Whether logits are changed before the temperature."""
        return self.penalties or self.biases or bool(self.bad_words or self.min_tokens)


def refuse(config: Any, names: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for the first of `names` that `config` sets to something else than None or one of its values."""
    for name, neutral in names.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            raise ValueError(
                f"generation_config.{name}: expected {' or '.join(map(str, (None, *neutral)))}, got {shown(value)}; "
                "it is not supported, set it to None on the model's generation_config to decode without it"
            )


def _bad_words(config: Any) -> tuple[tuple[int, ...], ...]:
    """bad_words_ids and suppress_tokens of a generation config; as in transformers, an end token alone is no bad word."""
    eos = getattr(config, "eos_token_id", None)
    ends = set(eos) if isinstance(eos, (list, tuple)) else {eos}
    words = [tuple(word) for word in getattr(config, "bad_words_ids", None) or ()]
    words = [word for word in words if len(word) != 1 or word[0] not in ends]
    return (*words, *((token,) for token in getattr(config, "suppress_tokens", None) or ()))


def check_bans(count: int) -> None:
    """Raise ValueError if a row would need more than MOST_BANS bans: bad words of several tokens, ends before min_tokens."""
    if count > MOST_BANS:
        raise ValueError(
            f"bad_words, min_tokens: expected at most {MOST_BANS} together, words of several tokens and ids that end a row "
            f"which min_tokens holds back, got {count}"
        )


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
    if value is None and name in ("top_k", "k", "seed", "lag", "min_tokens", "logprobs", "prompt_logprobs"):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__} {shown(value)}")
    if value < low or (high is not None and value > high):
        raise ValueError(
            f"{name}: expected {f'{low} to {high}' if high is not None else f'at least {low}'}, got {shown(value)}"
        )


def _check_real(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False, optional: bool = True
) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} {shown(value)}")
    if not (low < value if open_low else low <= value) or not value <= high or math.isinf(value):
        bound = f"{'more than' if open_low else 'at least'} {low:g}" + (
            f" and at most {high:g}" if high < math.inf else ""
        )
        raise ValueError(f"{name}: expected {bound}, got {shown(value)}")
