"""The forwards that take in prompts, replayed as CUDA graphs where their shapes come again."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.advice import advise
from specdec.chunks import ChunkShape, Layout, lay_out, packed
from specdec.flight import sent_home
from specdec.graphs import captured
from specdec.kernels.logprobs import logprobs
from specdec.logprobs import width
from specdec.model import Packed, PagedModel
from specdec.scheduler import Chunk
from specdec.uploads import send, sent

_MOST = 32
"""Graphs kept; those that have not been used for longest go first."""
_MOST_TOKENS = 2048
"""Of a graph: with more of them the device takes longer than the host, and what they need would be kept for good."""


class PromptForward:
    """Runs chunks of prompts through `model`, whose inputs and rows are on `device`.

    A forward over a few hundred tokens is hundreds of small kernels, which the host needs longer to launch than the device
    to run. With `graphs`, the second use of a shape is a replay: `capture`, called while the device has other work,
    captures what ran for the first time since. A capture that fails is reported once, and its shape goes on without.
    """

    def __init__(self, model: PagedModel, device: torch.device, *, graphs: bool):
        self.model, self.device, self.graphs = model, device, graphs
        self.replays = 0
        self._captured: dict[ChunkShape, tuple[Layout, torch.cuda.CUDAGraph] | None] = {}
        self._wanted: list[ChunkShape] = []
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def run(self, chunks: list[Chunk]) -> None:
        """Write the KV of `chunks`."""
        shape = ChunkShape.bucket(chunks) if self.graphs else None
        if shape and shape.tokens > _MOST_TOKENS:
            shape = None
        found = self._captured.get(shape) if shape else None
        if found is None:
            self.model.extend(self._exact(chunks), logits=False)
            if shape and shape not in self._captured and shape not in self._wanted:
                self._wanted.append(shape)
            return
        assert shape is not None
        self._captured[shape] = self._captured.pop(shape)
        inputs, graph = found
        for theirs, ours in zip(inputs, lay_out(chunks, shape, self.model.vocab_size), strict=True):
            send(ours, theirs)
        graph.replay()
        self.replays += 1

    def score(self, chunks: list[Chunk], vocab_size: int) -> tuple[Tensor, ...]:
        """Write the KV of `chunks`; the log-probabilities of each one's next tokens, on their way to the host."""
        logits = self.model.extend(self._exact(chunks), prompt=True)
        top = width(c.seq.params.prompt_logprobs for c in chunks) or 0
        tokens = torch.tensor([t for c in chunks for t in c.seq.token_ids[c.start + 1 : c.end + 1]])
        values = sent_home(logprobs(logits[:, :vocab_size], sent(tokens, self.device), top))
        return values.split([c.end - c.start for c in chunks])

    def capture(self) -> None:
        """Capture the shapes that have run once."""
        for shape in self._wanted:
            self._captured[shape] = self._capture(shape)
            if len(self._captured) > _MOST:
                del self._captured[next(iter(self._captured))]
        self._wanted.clear()

    def forget(self) -> None:
        """Drop the graphs: they hold weights that have been replaced."""
        self._captured.clear()

    def _capture(self, shape: ChunkShape) -> tuple[Layout, torch.cuda.CUDAGraph] | None:
        inputs = self._send(lay_out([], shape, self.model.vocab_size))  # all padding: writes nothing
        try:
            graph, _ = captured(
                lambda: self.model.extend(packed(inputs, self.model.pool.block_size, shape.tokens), logits=False),
                self._pool,
            )
        except Exception as error:
            advise(f"prompts of {shape.tokens} tokens could not be captured: {error!r}")
            return None
        return inputs, graph

    def _exact(self, chunks: list[Chunk]) -> Packed:
        layout = self._send(lay_out(chunks, ChunkShape.exact(chunks), self.model.vocab_size))
        return packed(layout, self.model.pool.block_size, max(c.end - c.start for c in chunks))

    def _send(self, layout: Layout) -> Layout:
        return Layout(*(sent(part, self.device) for part in layout))
