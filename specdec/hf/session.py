"""An engine that stays between calls: built for a model and a drafter, rebuilt when a call outgrows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from specdec.engine import Engine
from specdec.hf.call import Call
from specdec.hf.kept import Kept
from specdec.hf.processing import ProcessedVerifier
from specdec.hf.replay import Replay
from specdec.kvpool import KVPool
from specdec.limits import Wishes, choose, learned_positions, max_positions
from specdec.llm import LLM
from specdec.model import active_adapters, device_of, kv_specs
from specdec.sequence import Sequence

_SHORTEST = 256
"""Tokens per row at least, so that short calls of growing length don't rebuild the engine each time."""


@dataclass(frozen=True)
class Options:
    """How sessions are built. k: drafts per row and round, None for the drafter's usual number.

    prefix_cache: keep prefixes from one call to the next. llm: options of `LLM`; sizes that it names are fixed, the
    others follow the calls.
    """

    k: int | None = None
    prefix_cache: bool = False
    llm: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Need:
    """What calls take at once: rows, tokens of the longest row, blocks of all rows."""

    rows: int
    length: int
    blocks: int

    @classmethod
    def of(cls, call: Call, block_size: int) -> Need:
        lengths = [len(prompt) + call.new_tokens for prompt in call.prompts]
        blocks = sum(-(-length // block_size) + 1 for length in lengths)
        return cls(len(lengths), max(lengths), blocks)

    def __or__(self, other: Need) -> Need:
        return Need(max(self.rows, other.rows), max(self.length, other.length), max(self.blocks, other.blocks))

    def covers(self, other: Need) -> bool:
        return self | other == self

    def rounded(self) -> Need:
        """Up to powers of two, so that growing calls rebuild seldom."""
        rows, length, blocks = (1 << (n - 1).bit_length() for n in (self.rows, self.length, self.blocks))
        return Need(rows, max(length, _SHORTEST), blocks)


class Session:
    """`run` calls on the paged runtime, one at a time, in the caller's thread.

    drafter: None, "lookup", a transformers model, or an object with `propose`. Building it raises what `LLM` raises.
    """

    def __init__(self, model: PreTrainedModel, drafter: Any, options: Options, need: Need):
        self.drafter, self.options = drafter, options
        self.models = [m for m in (model, drafter) if isinstance(m, PreTrainedModel)]
        self.need = need.rounded()
        # A caller's inference mode would leave weights and rows that nobody may write to outside of it; and whether a
        # call builds an engine must not change what later calls draw.
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.models), _own_random(model):
            self.llm = LLM(model, drafter=drafter, k=_or_auto(options.k), **self._sizes(model))
        self._marks, self._versions = _marks(self.models), _versions(self.models)
        self._adapters = [active_adapters(m) for m in self.models]
        self.busy = False

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    def serves(self, drafter: Any, need: Need) -> bool:
        """Whether a call can run here: on these weights, with this drafter or none, in these sizes."""
        same = drafter is None or drafter is self.drafter
        fits = all(n <= size or fixed for n, size, fixed in self._compare(need))
        return same and fits and self._marks == _marks(self.models)

    def run(self, call: Call, k: int | None) -> GenerateDecoderOnlyOutput:
        """Decode `call`, k drafts per row and round (None: the engine's own): sequences [B, L + emitted] int64.

        scores, logits: tuples of [B, vocab] fp32, one for each emitted token, if the call asks for them.
        """
        if self.busy:
            raise RuntimeError("generate: this model is decoding; a streamer or criterion may not call it again")
        self.busy = True
        try:
            with torch.inference_mode(False), torch.no_grad(), evaluating(self.models):
                return self._run(call, k)
        finally:
            self.busy = False

    def close(self) -> None:
        """Give the KV memory back and leave the models as they were."""
        self.llm.close()

    def _run(self, call: Call, k: int | None) -> GenerateDecoderOnlyOutput:
        self._forget_prefixes()
        seqs = call.sequences(k)
        with self._processing(call, seqs) as processing:
            replay = Replay(call, seqs, self.engine.cancel, processing.kept if processing else None)
            try:
                for seq in seqs:
                    self.engine.submit(seq)
                while not replay.finished:
                    self.engine.step()
                    replay.advance()
            finally:
                for seq in seqs:
                    self.engine.cancel(seq)
                self.engine.run()  # what is in flight belongs to nobody any more
        if call.streamer is not None:
            call.streamer.end()
        kept = processing.kept.outputs(replay.lengths, call.input_ids.device) if processing else {}
        return GenerateDecoderOnlyOutput(sequences=replay.sequences(), **kept)

    @contextmanager
    def _processing(self, call: Call, seqs: list[Sequence]) -> Iterator[ProcessedVerifier | None]:
        """Within it rounds run the call's processors and keep scores, if asked to; not as graphs: they look at lengths."""
        engine = self.engine
        before = engine.round.verifier, engine.graphs
        processing = None
        if call.processors or Kept(call).names:
            processing = engine.round.verifier = ProcessedVerifier(before[0], call, seqs, engine.scheduler.placed)
            engine.graphs = None  # type: ignore[assignment]
        try:
            yield processing
        finally:
            engine.round.verifier, engine.graphs = before

    def _forget_prefixes(self) -> None:
        """Weights may have changed since the last call, in ways that only the caller knows."""
        before, self._adapters = self._adapters, [active_adapters(m) for m in self.models]
        if self._adapters != before:
            self.engine.reset_prefix_cache()  # and graphs that ran the others
        versions = _versions(self.models)
        if not self.options.prefix_cache or versions != self._versions:
            self.engine.pool.allocator.reset_prefix_cache()
        self._versions = versions

    def _sizes(self, model: PreTrainedModel) -> dict[str, Any]:
        """Options of `LLM`: the user's sizes, and for the rest as much as the calls need and the memory allows."""
        given = self.options.llm
        positions = [max_positions(model), *map(learned_positions, self.models[1:])]
        length = given.get("max_model_len") or min([self.need.length, *filter(None, positions)])
        rows, size = given.get("max_rows") or self.need.rows, given.get("block_size", 16)
        sizes = {**given, "max_model_len": length, "max_rows": rows}
        if "kv_memory" not in given:
            wishes = (given.get("kv_dtype", "auto"), "auto")  # a draft model keeps its own
            specs = [spec for m, wish in zip(self.models, wishes, strict=False) for spec in kv_specs(m, wish)]
            blocks = min(choose(self.models, specs, Wishes(length, rows, None, size)).num_blocks, self.need.blocks)
            sizes["kv_memory"] = blocks * KVPool.bytes_per_block_of(specs, size)
        return sizes

    def _compare(self, need: Need) -> Iterator[tuple[int, int, bool]]:
        """(needed, there, and whether building anew would bring no more) for each size."""
        limits, given = self.llm.limits, self.options.llm
        yield need.rows, limits.max_rows, "max_rows" in given
        yield need.length, limits.max_model_len, "max_model_len" in given
        # Fewer blocks than once were needed: the memory had no more, and waiting rows take their turn.
        short = limits.num_blocks < self.need.blocks
        yield need.blocks, limits.num_blocks, "kv_memory" in given or (short and self.need.covers(need))


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Within it nothing drops out: what is drawn must be a function of the tokens. Every module's mode is restored."""
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _own_random(model: PreTrainedModel) -> Any:
    """Within it torch's generators may be used; they go on afterwards from where they were."""
    where = device_of(model)
    return torch.random.fork_rng(devices=[where] if where.type == "cuda" else [])


def _or_auto(k: int | None) -> int | str:
    return "auto" if k is None else k


def _marks(models: list[PreTrainedModel]) -> list[tuple[int, ...]]:
    """Changes when a parameter moves, is replaced or cast, or modules are added: fused and captured weights are stale."""
    parameters = [(id(p), p.data_ptr(), p.element_size()) for m in models for p in m.parameters()]
    return [*parameters, tuple(sum(1 for _ in m.modules()) for m in models)]


def _versions(models: list[PreTrainedModel]) -> list[int]:
    """Changes when a parameter is written to, by an optimizer's step for example; not by way of `.data`."""
    return [0 if p.is_inference() else p._version for m in models for p in m.parameters()]
