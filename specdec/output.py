"""What people get back: `Piece` while a sample is decoded, `Output` at its end, `Handle` to hold one request by."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from specdec.detokenizer import Detokenizer
from specdec.logprobs import TokenLogprobs
from specdec.sequence import RequestStats, Sequence


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one sample. token_ids: the tokens of a round, whose last characters may still be held back;
    logprobs: theirs, if they were asked for.
    """

    text: str
    token_ids: list[int]
    index: int
    finished: bool
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Output:
    """One sample of one prompt.

    finish_reason: "stop" (end token, stop id or string), "length", "cancelled" or "error", then with `error` set and
    whatever had been decoded before. seed: decodes this sample again as a request of its own. logprobs: of token_ids;
    prompt_logprobs: of prompt_token_ids, None for the first of them; None where they were not asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_token_ids: list[int]
    prompt_index: int
    index: int
    seed: int | None
    stats: RequestStats
    error: BaseException | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Handle:
    """A submitted request: iterate over its pieces, wait for its `results`, or `cancel` it. Safe from any thread."""

    def __init__(
        self,
        seqs: list[Sequence],
        prompt_index: int,
        cancel: Callable[[Handle], None],
        ended: Callable[[Handle], None],
    ):
        self.seqs, self.prompt_index = seqs, prompt_index
        self._cancel, self._ended = cancel, ended
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._outputs: dict[int, Output] = {}

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they come, of all samples, until the last one has ended. Raises the error of a failed sample."""
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)  # iterating again, or waiting, ends at once
        for output in self._outputs.values():
            if output.error:
                raise output.error

    def __await__(self) -> Generator[object, None, Output]:
        return asyncio.to_thread(self.result).__await__()

    def results(self) -> list[Output]:
        """Wait for every sample; failed ones carry their error."""
        while self._pieces.get() is not None:
            continue
        self._pieces.put(None)
        return [self._outputs[seq.index] for seq in self.seqs]

    def result(self) -> Output:
        """Wait for the first sample (the only one unless n > 1). Raises its error if it failed."""
        output = self.results()[0]
        if output.error:
            raise output.error
        return output

    def cancel(self) -> None:
        """Stop decoding; what was decoded stays. Does nothing to a request that has ended."""
        self._cancel(self)

    def has(self, seq: Sequence) -> bool:
        """Whether this sample has ended."""
        return seq.index in self._outputs

    @property
    def done(self) -> bool:
        return len(self._outputs) == len(self.seqs)

    def _deliver(self, piece: Piece) -> None:
        self._pieces.put(piece)

    def _end(self, output: Output) -> None:
        self._outputs[output.index] = output
        if self.done:
            self._ended(self)
            self._pieces.put(None)


class Transcript:
    """Listens to one sequence for its handle: turns tokens into text, finds stop strings, delivers pieces."""

    def __init__(self, handle: Handle, detokenizer: Detokenizer | None):
        self.handle, self.detokenizer = handle, detokenizer
        self._shown = 0

    def emitted(self, seq: Sequence, token_ids: list[int]) -> tuple[int, bool]:
        text, kept, stopped = self.detokenizer, len(token_ids), False
        if text:
            kept = next((i + 1 for i, token in enumerate(token_ids) if text.add(token)), kept)
            stopped = text.stopped
        self._deliver(seq, token_ids[:kept], finished=False)
        return kept, stopped

    def finished(self, seq: Sequence) -> None:
        reason, error = seq.finish_reason or "error", seq.error
        try:
            if self.detokenizer:
                self.detokenizer.finish()
        except Exception as failure:  # of the tokenizer: the tokens stay, and whatever text there was
            reason, error = "error", error or failure
        self._deliver(seq, [], finished=True)
        self.handle._end(
            Output(
                text=self.detokenizer.text if self.detokenizer else "",
                token_ids=seq.output_ids,
                finish_reason=reason,
                prompt_token_ids=seq.token_ids[: seq.prompt_len],
                prompt_index=self.handle.prompt_index,
                index=seq.index,
                seed=seq.seed & ((1 << 64) - 1),
                stats=seq.stats,
                error=error,
                logprobs=None if seq.params.logprobs is None else seq.logprobs,
                prompt_logprobs=seq.prompt_logprobs,
            )
        )

    def _deliver(self, seq: Sequence, token_ids: list[int], finished: bool) -> None:
        new = ""
        if self.detokenizer:
            end = len(self.detokenizer.text) if finished else self.detokenizer.shown
            new, self._shown = self.detokenizer.text[self._shown : end], max(self._shown, end)
        logprobs = None
        if seq.params.logprobs is not None:
            first = len(seq.output_ids)  # they came before the tokens became the sequence's
            logprobs = seq.logprobs[first : first + len(token_ids)]
        if new or token_ids or finished:
            self.handle._deliver(Piece(new, token_ids, seq.index, finished, logprobs))
