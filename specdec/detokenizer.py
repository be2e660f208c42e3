"""Tokens to text, one token at a time: no character is split, no text is shown that a stop string takes back."""

from __future__ import annotations

from typing import Any


class Detokenizer:
    """The text of one output. `stop`: strings that end it; the text is cut before the one that completes first.

    `text` is what is decoded, `shown` how much of it may be streamed: a tail that could still become a stop string is
    held back, and so is a token that ends inside a UTF-8 character.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        self._context = self._decoded = 0

    def add(self, token_id: int) -> bool:
        """Append one token; True if it completes a stop string, after which nothing may be added."""
        self._ids.append(token_id)
        self._advance(whole=False)
        return self.stopped

    def decode(self, token_ids: list[int]) -> str:
        """The text of all tokens at once, where none was added before and no stop string is looked for."""
        self._ids += token_ids
        return self.finish()

    def finish(self) -> str:
        """Whatever is still held back belongs to the text now. Returns the whole text."""
        if not self.stopped:
            self._advance(whole=True)
        return self.text

    @property
    def shown(self) -> int:
        """Characters of `text` that later tokens can't take back."""
        if self.stopped:
            return len(self.text)
        longest = max((len(s) for s in self.stop), default=1) - 1
        for n in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-n:]) for s in self.stop):
                return len(self.text) - n
        return len(self.text)

    def _advance(self, whole: bool) -> None:
        # Decoding needs the tokens before the new ones: whether a word starts with a space depends on them.
        before = self._decode(self._ids[self._context : self._decoded])
        after = self._decode(self._ids[self._context :])
        if (after.endswith("\ufffd") and not whole) or len(after) <= len(before):
            return
        self._append(after[len(before) :])
        self._context, self._decoded = self._decoded, len(self._ids)

    def _append(self, new: str) -> None:
        start = len(self.text)
        self.text += new
        ends = [(self.text.find(s, max(0, start - len(s) + 1)), s) for s in self.stop]
        found = [(at + len(s), at) for at, s in ends if at >= 0]
        if found:
            self.text = self.text[: min(found)[1]]
            self.stopped = True

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
