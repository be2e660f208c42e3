"""Transformers' own decoding loop, run over what the rows emit instead of over a model.

Its stopping criteria and its streamer see whole batches, a token a step, while rows of the engine run ahead of each
other. So a step is replayed once every row has its token, and criteria keep the meaning that they have there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.hf.call import Call
from specdec.hf.kept import Kept
from specdec.sequence import Sequence, Status


class Replay:
    """`advance` after every round; `sequences` once `finished`. cancel: ends a row that a criterion has stopped.

    kept: the scores that criteria are shown, if the call asks for scores.
    """

    def __init__(self, call: Call, seqs: list[Sequence], cancel: Callable[[Sequence], None], kept: Kept | None = None):
        self.call, self.seqs, self.cancel = call, seqs, cancel
        self._kept = kept if kept and call.keeps("scores") else None
        self._scores: tuple[Tensor, ...] = ()
        self.watched = bool(call.watchers) or call.streamer is not None
        self.ends: list[int | None] = [None] * len(seqs)
        self._steps = 0
        self._ids = call.input_ids

    @property
    def finished(self) -> bool:
        if self.watched:
            return None not in self.ends
        return all(seq.status is Status.FINISHED for seq in self.seqs)

    def advance(self) -> None:
        """Replay the steps that every row has a token for. Raises the error of a row that failed."""
        for seq in self.seqs:
            if seq.error:
                raise self._told(seq.error)
        while self.watched and not self.finished:
            tokens = [self._token(r) for r in range(len(self.seqs))]
            if None in tokens:
                break
            self._step(torch.tensor(tokens))

    def sequences(self) -> Tensor:
        """[B, L + steps] int64 on the device of the prompts: rows that ended are padded, as transformers does."""
        lengths = self.lengths
        new = torch.full((len(lengths), self._steps if self.watched else max(lengths)), self.call.pad_id)
        for r, length in enumerate(lengths):
            new[r, :length] = torch.tensor(self.seqs[r].output_ids[:length])
        return torch.cat([self.call.input_ids, new.to(self.call.input_ids.device)], 1)

    @property
    def lengths(self) -> list[int]:
        """Emitted tokens of each row, its padding not counted."""
        if not self.watched:
            return [len(seq.output_ids) for seq in self.seqs]
        return [end if self.call.pads and end is not None else self._steps for end in self.ends]

    def _told(self, error: BaseException) -> BaseException:
        """The error of a row; of one that has no token left, what its logits went through."""
        names = ", ".join(type(processor).__name__ for processor in self.call.logits_processor)
        if isinstance(error, FloatingPointError) and names:
            error.add_note(f"after logits_processor: {names}")
        return error

    def _token(self, r: int) -> int | None:
        """Row r's token of this step, None while it is still to come."""
        if self.ends[r] is not None and self.call.pads:
            return self.call.pad_id
        output = self.seqs[r].token_ids
        at = self.seqs[r].prompt_len + self._steps
        return output[at] if at < len(output) else None

    def _step(self, tokens: Tensor) -> None:
        self._steps += 1
        done = self._watch(tokens)
        for r, token in enumerate(tokens.tolist()):
            if self.ends[r] is None and (done[r] or token in self.call.eos_ids or self._steps >= self.call.new_tokens):
                self.ends[r] = self._steps
                if self.call.pads:
                    self.cancel(self.seqs[r])
        if self.call.streamer is not None:
            self.call.streamer.put(tokens)

    def _watch(self, tokens: Tensor) -> list[bool]:
        """What the criteria say of each row; they all see every step, as they may count."""
        if not self.call.watchers:
            return [False] * len(self.seqs)
        self._ids = torch.cat([self._ids, tokens[:, None].to(self._ids.device)], 1)
        if self._kept:
            running = [end is None for end in self.ends]
            self._scores += (self._kept.step("scores", self._steps - 1, running).to(self._ids.device),)
        done = torch.zeros(len(self.seqs), dtype=torch.bool, device=self._ids.device)
        for criterion in self.call.watchers:
            done = done | criterion(self._ids, self._scores if self._kept else None)
        return done.tolist()
