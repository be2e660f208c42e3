"""LLM: prompts in, text out. It loads models, sizes the pool, builds the engine and runs it in a thread."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from specdec import options
from specdec.advice import DEBUG
from specdec.detokenizer import Detokenizer
from specdec.draft import Drafter, LookupDrafter, ModelDrafter, check_vocabulary
from specdec.engine import Engine, EngineConfig
from specdec.grammar import Grammars
from specdec.kvpool import KVPool
from specdec.limits import Wishes, Work, choose
from specdec.loading import Loaded, load_model
from specdec.metrics import exposition
from specdec.model import PagedModel, device_of, kv_specs
from specdec.output import Handle, Output, Piece, Transcript
from specdec.rows import Rows
from specdec.sampling import SamplingParams, check_int, sample_seed
from specdec.scheduler import DRAFTER, TARGET
from specdec.sequence import Sequence
from specdec.shown import shown
from specdec.stats import EngineStats
from specdec.verify import VERIFIERS
from specdec.warm_up import batches
from specdec.warm_up import warm_up as run_shapes
from specdec.worker import Worker

_log = logging.getLogger(__name__)

Prompt = str | list[int]
Message = dict[str, str]


class LLM:
    """A model with paged speculative decoding.

    model: alias ("smollm2-135m"), hub id, folder, .gguf file, or a loaded transformers model.
    drafter: None, "lookup", a model (any of the above), or an object with `propose(rows, k)` (see specdec.draft).
    verifier: "coupled" (the output is a function of the seed alone), "rejection" or "block" (only its distribution is, and
    a seed repeats its tokens with a fixed k alone, not with "auto"; a few more drafts are accepted where rows sample). See
    docs/losslessness.md.
    k: drafts per row and round; "auto" drafts as much as pays, by what rounds take and how far drafts survive, at times
    nothing at all. Requests may set their own number, which is kept to.
    max_model_len: tokens per sequence at most; max_rows: sequences that run at once; kv_memory: bytes for KV.
    kv_dtype: "auto" keeps KV in the model's dtype, "fp8" in a byte a number, for twice the tokens of bf16: docs/fp8.md.
    kv_scales: for fp8, KVScales, a file that they were saved to, or texts to calibrate them on; None calibrates on random
    tokens. drafter_kv_dtype: the same choice for a draft model.
    graphs, compile: rounds as CUDA graphs, decoder layers through torch.compile; "auto" is on a GPU only.
    warm_up: capture graphs, compile, and measure what rounds take before the first request: for the numbers of rows in a
    list, or for 1, 2, 4, ... max_rows (True). False does it when a round first has a shape, which takes that one seconds.
    seed: for requests that bring none; each then draws from it by its number. lag: see EngineConfig.
    trust_remote_code, allow_pickle: run code that comes with the model, or sits in pickled weights; see load_model.

    Raises ValueError or TypeError naming the argument for what can't be loaded or paged, or doesn't fit together.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        *,
        tokenizer: Any = None,
        drafter: Any = None,
        verifier: str = "coupled",
        k: int | str = "auto",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_rows: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: str | torch.dtype = "auto",
        kv_scales: Any = None,
        drafter_kv_dtype: str | torch.dtype = "auto",
        block_size: int = 16,
        prompt_budget: int = 512,
        graphs: bool | str = "auto",
        compile: bool | str = "auto",
        warm_up: bool | list[int] = False,
        lag: int | None = None,
        revision: str | None = None,
        seed: int | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ):
        if verifier not in VERIFIERS:
            raise ValueError(f"verifier: expected {', '.join(VERIFIERS)}, got {shown(verifier)}")
        options.check_drafter(drafter)  # what needs no weights is said before they are loaded
        options.check_k(k, "none")
        check_int("prompt_budget", prompt_budget, 1)
        check_int("seed", seed, -(1 << 63), (1 << 64) - 1)
        check_int("lag", lag, 0, 8)
        load = partial(load_model, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        loaded = load(model, revision=revision, dtype=dtype, device=device)
        wishes = Wishes(max_model_len, max_rows, kv_memory, block_size)
        self.model, self.tokenizer = loaded.model.eval(), tokenizer or loaded.tokenizer
        self.seed, self._submitted = seed, 0
        self._grammar: Grammars | None = None
        kind, draft_model = self._find_drafter(drafter, load)
        self.k = options.check_k(k, kind)
        device = device_of(self.model)
        self.vocab_size = self.model.config.get_text_config().vocab_size
        captured = options.on_gpu("graphs", graphs, device)
        compiled = options.on_gpu("compile", compile, device)
        specs = kv_specs(self.model, kv_dtype)
        self.kv_scales = options.kv_scales(self.model, specs, kv_scales, self.tokenizer)
        models, draft_specs, draft_scales = [self.model], [], None
        if draft_model is not None:
            with options.naming_the_drafter():
                draft_specs = kv_specs(draft_model, drafter_kv_dtype, "drafter_kv_dtype")
            draft_scales = options.kv_scales(draft_model, draft_specs)
            models.append(draft_model)
        elif drafter_kv_dtype != "auto":
            raise ValueError(f"drafter_kv_dtype: expected a draft model beside it, got {shown(drafter)}")
        work = Work(self.k, prompt_budget, graphs=captured)
        self.limits = choose(models, [*specs, *draft_specs], wishes, work)
        warm_rows = batches(warm_up, self.limits.max_rows)
        pool = KVPool(self.limits.num_blocks, block_size, poison=DEBUG)
        rows = Rows(self.limits.max_rows, self.limits.max_model_len, block_size, device, self.vocab_size)
        target = PagedModel(self.model, pool, TARGET, compiled=compiled, scales=self.kv_scales)
        try:
            if draft_model is not None:
                with options.naming_the_drafter():
                    paged = PagedModel(draft_model, pool, DRAFTER, compiled=compiled, scales=draft_scales)
                drafter = ModelDrafter(paged, vocab_size=self.vocab_size, keep_q=verifier != "coupled")
            elif kind == "lookup":
                drafter = LookupDrafter()
            captured = captured and options.can_be_captured(graphs, target, drafter)
        except BaseException:
            target.close()  # the model object must be as it was
            raise
        config = EngineConfig(self.k, prompt_budget, options.lag(lag, device), captured, adaptive=k == "auto")
        salt = f"{loaded.source}@{loaded.revision}".encode()
        self.engine = Engine(target, VERIFIERS[verifier](self.vocab_size), rows, drafter, config, salt)
        self._handles: dict[Handle, list[Transcript]] = {}  # of requests that have not ended
        self._lock = threading.Lock()
        self._worker = Worker(self.engine, _weakly(self._fail_all))
        self._let_go = weakref.finalize(self, self._worker.close, then=partial(_give_back, self.engine))
        self._let_go.atexit = False  # the process's end gives all back
        try:
            self.warm_up(warm_rows)
        except BaseException:
            self.close()
            raise

    # -- asking

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Decode every prompt; one Output per prompt and sample, in order.

        A bad prompt in a list fails alone: its Output carries the error, the others are decoded. A single prompt
        raises it. progress: show a bar on standard error.
        """
        batch = _as_batch(prompts)
        if batch is None:
            return self._collect([self.submit(cast(Prompt, prompts), cast(SamplingParams | None, params))], progress)
        each = params if isinstance(params, list) else [params] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"params: expected one for each of {len(batch)} prompts, got {len(each)}")
        requests: list[Handle | Output] = []
        asked = list(zip(range(len(batch)), batch, each, strict=True))
        for start in range(0, len(asked), self.limits.max_rows):
            requests += self._submit_together(asked[start : start + self.limits.max_rows])
        return self._collect(requests, progress, raising=False)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """`generate` on one conversation, or a list of them, through the tokenizer's chat template."""
        if isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple)):
            each: list[Prompt] = [self.chat_ids(m) for m in messages]
            return self.generate(each, params, progress=progress)
        return self.generate(self.chat_ids(cast(list[Message], messages)), params, progress=progress)

    def chat_ids(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. The template brings its own BOS."""
        if not isinstance(messages, (list, tuple)) or not all(isinstance(m, dict) for m in messages):
            raise TypeError(
                'messages: expected dicts like {"role": "user", "content": "..."}, or a list of such conversations, '
                f"got {shown(messages)}"
            )
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("messages: this model's tokenizer has no chat template; use generate with a prompt")
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            raise ValueError(f"messages: the chat template refuses them: {error!r}") from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Pieces of text as they are decoded. Leaving the loop early cancels the request."""
        handle = self.submit(prompt, params)
        self._refuse_inside([handle])
        try:
            yield from handle
        finally:
            handle.cancel()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, prompt_index: int = 0) -> Handle:
        """Start a request and return at once. Requests join and leave running batches; safe from any thread."""
        handle = self._prepare(prompt, params, prompt_index)
        self._start([handle])
        return handle

    def _prepare(self, prompt: Prompt, params: SamplingParams | None, prompt_index: int) -> Handle:
        """A request that has not started yet."""
        ids = self._encode(prompt)
        params = self._resolve(params or SamplingParams(), len(ids))
        limit = min(len(ids) + params.max_tokens, self.limits.max_model_len)
        eos = options.eos_ids(self.model)
        seqs = [Sequence(ids, params, limit=limit, index=i, eos=eos) for i in range(params.n)]
        for seq in seqs:
            if params.structured:
                seq.processors = (*seq.processors, self._grammars().processor(params, len(ids)))
        for seq in seqs[1:]:
            seq.parent = seqs[0]
        self.engine.scheduler.check_fits(seqs[0])
        return Handle(seqs, prompt_index, self._cancel, self._forget, lambda: self._detokenizer(params))

    def _start(self, handles: list[Handle]) -> None:
        """Hand requests to the engine in one piece, so that it takes in as many prompts at a time as it can."""
        self._refuse_training()
        for handle in handles:
            self._handles[handle] = [Transcript(handle, handle.detokenizer()) for _ in handle.seqs]
        pairs = [pair for h in handles for pair in zip(h.seqs, self._handles[h], strict=True)]

        def start() -> None:
            for seq, transcript in pairs:
                self.engine.submit(seq, transcript)

        try:
            self._worker.do(start)
        except RuntimeError:
            for handle in handles:
                self._forget(handle)
            raise

    # -- housekeeping

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def metrics(self) -> str:
        """The engine's counters in Prometheus's text format; see docs/metrics.md. Costs the engine nothing."""
        return exposition(self.engine)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. To be called after the weights have changed, or other adapters were made active.

        Raises ValueError if their dtype or device changed: that takes a new LLM.
        """
        self._carry_out(self.engine.reset_prefix_cache)

    def warm_up(self, rows: bool | list[int] = True) -> None:
        """What LLM(warm_up=rows) does, to be called before the first request, or where none is running.

        For requests as the model's own defaults have them, and for greedy ones. Raises RuntimeError if a round fails, or
        while requests are running.
        """
        numbers, config = batches(rows, self.limits.max_rows), self.model.generation_config
        if not numbers:
            return
        each = [params.resolve(config, 0) for params in (SamplingParams(temperature=0.0), SamplingParams())]
        kinds = list({(params.noise, params.filters): params for params in each}.values())
        _log.info("warming up for rounds of %s rows", ", ".join(map(str, numbers)))
        self._carry_out(partial(run_shapes, self.engine, numbers, kinds))

    def close(self) -> None:
        """Cancel what runs, end the thread, give the KV memory back. The transformers models stay usable.

        An LLM that nobody holds any more, nor a handle of it, closes itself.
        """
        if self._worker.closed:
            return
        self._worker.close()
        self._fail_all(RuntimeError("the LLM was closed"))
        self._let_go()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _carry_out(self, order: Callable[[], None]) -> None:
        """Run `order` in the engine's thread and wait for it. Raises what it raises."""
        done = concurrent.futures.Future[None]()

        def run() -> None:
            try:
                order()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._worker.do(run)
        if not self._worker.inside:
            done.result()

    def _find_drafter(self, drafter: Any, load: Callable[..., Loaded]) -> tuple[str, PreTrainedModel | None]:
        """What kind of drafter is meant, and its model if it is one."""
        if drafter is None or drafter == "lookup":
            return drafter or "none", None
        if isinstance(drafter, Drafter):
            return "own", None
        try:
            where = (
                {}
                if isinstance(drafter, PreTrainedModel)
                else {"dtype": self.model.dtype, "device": device_of(self.model)}
            )
            loaded = load(drafter, **where)
        except ValueError as error:
            raise ValueError(f'drafter: expected None, "lookup" or a model; {error}') from error
        check_vocabulary(self.model, loaded.model, self.tokenizer, loaded.tokenizer)
        return "model", loaded.model.eval()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: this model came without a tokenizer; pass tokenizer= or token ids")
            ids = self.tokenizer(prompt)["input_ids"]
        elif isinstance(prompt, (list, tuple)):
            ids = list(prompt)
        else:
            raise TypeError(f"prompt: expected a string or a list of token ids, got {type(prompt).__name__}")
        if not ids:
            raise ValueError("prompt: expected at least one token, got an empty prompt")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"prompt: expected token ids (int), got {type(token).__name__} {shown(token)}")
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"prompt: expected token ids in 0..{self.vocab_size - 1}, got {shown(token)}")
        if len(ids) >= self.limits.max_model_len:
            raise ValueError(
                f"prompt: expected at most {self.limits.max_model_len - 1} tokens (max_model_len less one to emit), "
                f"got {len(ids)}"
            )
        return ids

    def _resolve(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params: expected SamplingParams, got {type(params).__name__}")
        params = replace(params, bad_words=self._bad_words(params))
        with self._lock:
            number, self._submitted = self._submitted, self._submitted + 1
        seed = None if self.seed is None else sample_seed(self.seed, number)
        params = params.resolve(self.model.generation_config, seed, prompt_len=prompt_len)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: stop strings need a tokenizer, and this model came without one")
        params.check_vocabulary(self.vocab_size)
        return params

    def _grammars(self) -> Grammars:
        """Made for the first request that needs it: it reads the whole vocabulary."""
        if self._grammar is None:
            self._grammar = Grammars(self.tokenizer, self.vocab_size, options.eos_ids(self.model))
        return self._grammar

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...] | None:
        """Strings as token ids: the word itself, and with a space before it, as it stands inside a text."""
        words: list[tuple[int, ...]] = []
        for word in params.bad_words or ():
            if not isinstance(word, str):
                words.append(word)
            elif self.tokenizer is None:
                raise ValueError("bad_words: strings need a tokenizer, and this model came without one")
            else:
                texts = dict.fromkeys((word, " " + word.lstrip(" ")))
                words += [tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        return None if params.bad_words is None else tuple(dict.fromkeys(words))

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        return None if self.tokenizer is None else Detokenizer(self.tokenizer, tuple(params.stop or ()))

    def _submit_together(self, asked: list[tuple[int, Prompt, SamplingParams | None]]) -> list[Handle | Output]:
        """Start (index, prompt, parameters) each; an Output with the error for those that can't."""
        requests: list[Handle | Output] = []
        for index, prompt, params in asked:
            try:
                requests.append(self._prepare(prompt, params, index))
            except Exception as error:  # a tokenizer's own, too
                requests.append(Output.failed(prompt, index, error))
        try:
            self._start([r for r in requests if isinstance(r, Handle)])
        except RuntimeError as error:
            return [Output.failed(prompt, index, error) for index, prompt, _ in asked]
        return requests

    def _collect(self, requests: list[Handle | Output], progress: bool, raising: bool = True) -> list[Output]:
        """Wait for all; an interrupt cancels what still runs."""
        handles = [r for r in requests if isinstance(r, Handle)]
        outputs: list[Output] = []
        self._refuse_inside(handles)
        try:
            with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
                task = bar.add_task("decoding", total=sum(len(h.seqs) for h in handles))
                for request in requests:
                    results = request.results() if isinstance(request, Handle) else [request]
                    bar.advance(task, len(results))
                    outputs += results
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        if raising and outputs[0].error:
            raise outputs[0].error
        return outputs

    def _refuse_training(self) -> None:
        """Raise RuntimeError for a model that drops out: what it decodes would be no function of the tokens."""
        for paged in (self.engine.target, self.engine.draft_model):
            if paged and any(module.training for module in paged.model.modules()):
                raise RuntimeError(
                    f"model: this {type(paged.model).__name__} is in training mode, where dropout changes what is decoded; "
                    "call its eval() first"
                )

    def _refuse_inside(self, handles: list[Handle]) -> None:
        """Raise RuntimeError in the engine's own thread (a drafter, a tokenizer): it would wait for itself."""
        if self._worker.inside:
            for handle in handles:
                handle.cancel()
            raise RuntimeError("generate and stream were called from inside a round of the same LLM; it can't go on")

    def _forget(self, handle: Handle) -> None:
        self._handles.pop(handle, None)

    def _cancel(self, handle: Handle) -> None:
        for seq in handle.seqs:
            self.engine.cancel(seq)

    def _fail_all(self, error: BaseException) -> None:
        """The engine runs no more: end every handle that still waits, whether its sequences had reached it or not."""
        self.engine.listeners.clear()
        for handle, transcripts in list(self._handles.items()):
            for seq, transcript in zip(handle.seqs, transcripts, strict=True):
                if not handle.has(seq):
                    seq.finish("error", error)
                    transcript.finished(seq)


def generate(
    model: PreTrainedModel, prompts: Prompt | list[Prompt], *, drafter: Any = None, **params: Any
) -> list[Output]:
    """One call for a loaded transformers model: decode `prompts` with SamplingParams(**params), then let go of the KV.

    For strings, pass `tokenizer=` too. Other LLM options need an LLM.
    """
    tokenizer = params.pop("tokenizer", None)
    with LLM(model, tokenizer=tokenizer, drafter=drafter) as llm:
        return llm.generate(prompts, SamplingParams(**params))


def _weakly(method: Callable[[BaseException], None]) -> Callable[[BaseException], None]:
    """The bound method, as long as its object is there."""
    held = weakref.WeakMethod(method)

    def call(error: BaseException) -> None:
        if (method := held()) is not None:
            method(error)

    return call


def _give_back(engine: Engine) -> None:
    """The models are as they were, their KV is gone."""
    for model in (engine.target, engine.draft_model):
        if model:
            model.close()


def _as_batch(prompts: Any) -> list[Prompt] | None:
    """The prompts of a list of prompts, None for a single prompt (a string, or a list of token ids)."""
    if isinstance(prompts, list) and (not prompts or not isinstance(prompts[0], int)):
        return prompts
    return None
