"""Transformers' processors as sampling parameters, where a round does on the device what they do, to the last bit.

A round penalises, then biases and forbids (docs/sampling.md). What forbids commutes with all of it, so only the order of
penalties and finite biases counts. A processor whose settings mean something else here has no equal, and runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdec.sampling import BAN_LENGTH, MOST_BANS


@dataclass
class Parameters:
    """What processors of one batch ask for; `add` them in their order.

    width: columns of the padded prompts; padding: masked ones of each row; ends: the end tokens; new_tokens: to emit at most.
    """

    width: int
    padding: list[int]
    ends: tuple[int, ...]
    new_tokens: int
    vocab_size: int
    penalty: float | None = None
    biases: dict[int, float] | None = None
    forbidden: set[int] = field(default_factory=set)
    words: set[tuple[int, ...]] = field(default_factory=set)
    min_tokens: int = 0

    def add(self, processor: Any) -> bool:
        """Take `processor` in. False if it has no equal."""
        translate = _EQUALS.get(type(processor))
        return translate is not None and translate(self, processor)

    def fields(self) -> dict[str, Any] | None:
        """Fields of SamplingParams; None if a row has no room for so many bans."""
        held_back = len(set(self.ends)) if self.min_tokens else 0
        if len(self.words) + held_back > MOST_BANS:
            return None
        found: dict[str, Any] = {"repetition_penalty": self.penalty, "logit_bias": self.biases}
        found["bad_words"] = (*sorted(self.words), *((token,) for token in sorted(self.forbidden)))
        found["min_tokens"] = min(self.min_tokens, self.new_tokens)
        return {name: value for name, value in found.items() if value}

    # -- one kind of processor each

    def _penalise(self, processor: RepetitionPenaltyLogitsProcessor) -> bool:
        self.penalty, before = processor.penalty, self.penalty
        if before is not None or self.biases is not None or self.penalty > 1e4:
            return False
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            return ignored.tolist() == self.padding
        return not ignored and not any(self.padding)  # padding would be penalised too

    def _bias(self, processor: SequenceBiasLogitsProcessor) -> bool:
        finite: dict[int, float] = {}
        for tokens, bias in processor.sequence_bias.items():
            if bias == -torch.inf:
                if not self._forbid(tuple(map(int, tokens))):
                    return False
            elif len(tokens) == 1 and abs(bias) < 1e30 and int(tokens[0]) < self.vocab_size:
                finite[int(tokens[0])] = bias
            else:
                return False
        if finite and self.biases is not None:
            return False  # a sum of sums is rounded otherwise
        self.biases = finite or self.biases
        return True

    def _forbid(self, word: tuple[int, ...]) -> bool:
        if max(word) >= self.vocab_size or len(word) > min(BAN_LENGTH, self.width):
            return False  # transformers refuses such ids, and may not look for words that are longer than the prompt
        if len(word) == 1:
            self.forbidden.add(word[0])
        elif any(self.padding):
            return False  # it may begin in the padding
        else:
            self.words.add(word)
        return True

    def _suppress(self, processor: SuppressTokensLogitsProcessor) -> bool:
        self.forbidden.update(token for token in processor.suppress_tokens.tolist() if 0 <= token < self.vocab_size)
        return True

    def _min_length(self, processor: MinLengthLogitsProcessor) -> bool:
        return self._hold_back(processor.eos_token_id, processor.min_length - self.width)

    def _min_new_tokens(self, processor: MinNewTokensLengthLogitsProcessor) -> bool:
        ahead = self.width - processor.prompt_length_to_skip
        return self._hold_back(processor.eos_token_id, processor.min_new_tokens - ahead)

    def _hold_back(self, ends: Tensor, tokens: int) -> bool:
        self.min_tokens = max(self.min_tokens, tokens)
        return tokens <= 0 or set(ends.flatten().tolist()) == set(self.ends)


_EQUALS: dict[type, Callable[[Parameters, Any], bool]] = {
    RepetitionPenaltyLogitsProcessor: Parameters._penalise,
    SequenceBiasLogitsProcessor: Parameters._bias,
    NoBadWordsLogitsProcessor: Parameters._bias,
    SuppressTokensLogitsProcessor: Parameters._suppress,
    MinLengthLogitsProcessor: Parameters._min_length,
    MinNewTokensLengthLogitsProcessor: Parameters._min_new_tokens,
}


def translated(processors: Iterable[Any], parameters: Parameters) -> dict[str, Any] | None:
    """Fields of SamplingParams that mean what all of `processors` mean one after another; None where one has no equal."""
    return parameters.fields() if all(map(parameters.add, processors)) else None
