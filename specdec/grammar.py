"""Structured output: tokens that a JSON schema, a regular expression or a grammar allows, by llguidance (an extra)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.sampling import SamplingParams
from specdec.shown import shown


class Grammars:
    """Makes matchers for one tokenizer. vocab_size: the model's; eos: its end tokens, allowed where a text may end.

    Raises ValueError where llguidance is not there, or the tokenizer is not one of the fast ones of transformers.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: tuple[int, ...]):
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ValueError(
                "json_schema, regex, grammar: they need llguidance: pip install specdec[grammar]"
            ) from error
        try:
            self._tokenizer = from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), list(eos) or None)
        except Exception as error:
            raise ValueError(
                f"json_schema, regex, grammar: expected a fast tokenizer of transformers, got {type(tokenizer).__name__} "
                f"({error})"
            ) from error
        self._kinds: dict[str, Any] = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        self._matcher = LLMatcher

    def processor(self, params: SamplingParams, prompt_len: int) -> GrammarProcessor:
        """What holds the tokens after a prompt of `prompt_len` to the grammar of `params`. Raises ValueError if it is none."""
        name, text = next((name, getattr(params, name)) for name in self._kinds if getattr(params, name) is not None)
        matcher: Any = None
        try:
            matcher = self._matcher(self._tokenizer, self._kinds[name](text))
            problem = matcher.get_error()
        except Exception as error:
            problem = str(error)
        if problem:
            raise ValueError(
                f"{name}: expected one that llguidance understands, got {shown(text)} (the text itself, no path); of the "
                f"grammar that it makes of it, it says: {problem}"
            )
        return GrammarProcessor(matcher, prompt_len)


class GrammarProcessor:
    """A logits processor that leaves the tokens which may follow; called with any prefix, so with rejected drafts too."""

    def __init__(self, matcher: Any, prompt_len: int):
        self.matcher, self.prompt_len = matcher, prompt_len
        self._consumed: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [1, L], scores [1, V]. Scores stay as they are after tokens that the grammar forbids."""
        if not self._go_to(input_ids[0, self.prompt_len :].tolist()):
            return scores
        mask = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        allowed = bits.flatten()[: scores.shape[1]].bool().to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def _go_to(self, tokens: list[int]) -> bool:
        """Bring the matcher behind `tokens`: back to where it agrees with them, then on. False if it does not take them."""
        pairs = zip(self._consumed, tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._consumed), len(tokens)))
        if same < len(self._consumed):
            self.matcher.rollback(len(self._consumed) - same)
        del self._consumed[same:]
        taken = self.matcher.try_consume_tokens(tokens[same:])
        self._consumed += tokens[same : same + taken]
        return same + taken == len(tokens)
