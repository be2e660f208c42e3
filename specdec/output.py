"""What people get back: `Piece` while a sample is decoded, `Output` at its end, `Handle` to hold one request by."""

from __future__ import annotations

import asyncio
import threading
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

    @classmethod
    def failed(cls, prompt: str | list[int], index: int, error: Exception) -> Output:
        """Of a prompt that can't be decoded."""
        return cls(
            "", [], "error", list(prompt) if isinstance(prompt, list) else [], index, 0, None, RequestStats(), error
        )


_News = tuple[int, int, int, bool]
"""A piece whose text is left to whoever reads it: of which sample, from which of its tokens to which, and whether it
ended. A tuple of numbers: one a row and round is kept, and the garbage collector need not look at it.
"""


class Handle:
    """A submitted request: iterate over its pieces, wait for its `results`, or `cancel` it. Safe from any thread.

    Every iteration yields all pieces from the first on, and turns them into text itself: where nobody iterates, no text
    is made before the end.
    """

    def __init__(
        self,
        seqs: list[Sequence],
        prompt_index: int,
        cancel: Callable[[Handle], None],
        ended: Callable[[Handle], None],
        detokenizer: Callable[[], Detokenizer | None],
    ):
        self.seqs, self.prompt_index = seqs, prompt_index
        self._cancel, self._ended, self.detokenizer = cancel, ended, detokenizer
        self._news: list[_News] = []
        self._token_ids: dict[int, list[int]] = {seq.index: [] for seq in seqs}
        self._changed, self._listening = threading.Condition(), 0
        self._finished = threading.Event()
        self._outputs: dict[int, Output] = {}

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they come, of all samples, until the last one has ended. Raises the error of a failed sample."""
        texts = {seq.index: _Text(self.detokenizer()) for seq in self.seqs}
        logprobs = {seq.index: seq.logprobs for seq in self.seqs if seq.params.logprobs is not None}
        read = 0
        while not self._finished.is_set() or read < len(self._news):
            with self._changed:
                self._listening += 1  # before it looks: see _deliver
                while not self._finished.is_set() and read == len(self._news):
                    self._changed.wait()
                self._listening -= 1
            for index, start, end, finished in self._news[read:]:
                read += 1
                token_ids = self._token_ids[index][start:end]
                text = texts[index].of(token_ids, finished)
                if text or token_ids or finished:
                    yield Piece(text, token_ids, index, finished, logprobs[index][start:end] if logprobs else None)
        for output in self._outputs.values():
            if output.error:
                raise output.error

    def __await__(self) -> Generator[object, None, Output]:
        return asyncio.to_thread(self.result).__await__()

    def results(self) -> list[Output]:
        """Wait for every sample; failed ones carry their error."""
        self._finished.wait()
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

    def _deliver(self, index: int, token_ids: list[int], finished: bool = False) -> None:
        """New tokens of a sample; their log-probabilities are the sequence's already. The lock is taken where somebody
        waits: whoever begins to after this look finds the news there.
        """
        known = self._token_ids[index]
        start = len(known)
        known += token_ids
        self._news.append((index, start, len(known), finished))
        if self._listening:
            with self._changed:
                self._changed.notify_all()

    def _end(self, output: Output) -> None:
        self._outputs[output.index] = output
        if self.done:
            self._ended(self)
            with self._changed:
                self._finished.set()
                self._changed.notify_all()


class _Text:
    """The text of one sample for one reader, as far as it may be shown."""

    def __init__(self, detokenizer: Detokenizer | None):
        self.detokenizer, self.shown = detokenizer, 0

    def of(self, token_ids: list[int], finished: bool) -> str:
        """What these tokens bring that can be shown."""
        text = self.detokenizer
        if text is None:
            return ""
        for token in token_ids:
            text.add(token)
        end = len(text.finish()) if finished else text.shown
        new, self.shown = text.text[self.shown : end], max(self.shown, end)
        return new


class Transcript:
    """Listens to one sequence for its handle: delivers what comes, finds stop strings, makes the text at the end."""

    def __init__(self, handle: Handle, detokenizer: Detokenizer | None):
        self.handle, self.detokenizer = handle, detokenizer

    def emitted(self, seq: Sequence, token_ids: list[int]) -> tuple[int, bool]:
        text, kept, stopped = self.detokenizer, len(token_ids), False
        if text and text.stop:
            kept = next((i + 1 for i, token in enumerate(token_ids) if text.add(token)), kept)
            stopped = text.stopped
        self.handle._deliver(seq.index, token_ids[:kept])
        return kept, stopped

    def finished(self, seq: Sequence) -> None:
        reason, error, text = seq.finish_reason or "error", seq.error, self.detokenizer
        try:
            if text:
                text.finish() if text.stop else text.decode(seq.output_ids)
        except Exception as failure:  # of the tokenizer: the tokens stay, and whatever text there was
            reason, error = "error", error or failure
        self.handle._deliver(seq.index, [], finished=True)
        self.handle._end(
            Output(
                text=text.text if text else "",
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
