"""Tiny models, drafters that are always right or wrong, what plain decoding gives, a tokenizer: shared by the tests."""

from __future__ import annotations

import copy
import functools
import random

import torch
import transformers
from torch import Tensor
from transformers.generation import logits_process

from specdec.draft import DraftRows, LookupDrafter, ModelDrafter
from specdec.engine import Engine, EngineConfig
from specdec.kernels import Sampling, sample
from specdec.kvpool import KVPool
from specdec.model import KVScales, PagedModel, scales_for
from specdec.policy import Costs
from specdec.rows import Rows
from specdec.sampling import SamplingParams
from specdec.sequence import Sequence
from specdec.verify import VERIFIERS

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": 6}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**{**COMMON, "head_dim": 24}),
    "gemma2": lambda: transformers.Gemma2Config(**COMMON, **GEMMA, attn_logit_softcapping=3.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON, **GEMMA, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    ),
}


@functools.lru_cache(None)
@torch.inference_mode(False)  # whichever test comes first: others compute gradients
def tiny(name: str = "llama", seed: int = 0, noise: float = 0.0, layers: int = 2) -> transformers.PreTrainedModel:
    """A random model with weights large enough that a wrong mask shows. noise: perturb it, for a near drafter."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    if layers != 2:
        config.num_hidden_layers = layers
    # Eager: sdpa of transformers 5.17 ignores the soft cap of Gemma2 and would be no reference.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
        if noise:
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
    return model


def said_by_us(stderr: str) -> str:
    """Without the lines of torchao's own import, which transformers brings about wherever that package is installed."""
    return "".join(line for line in stderr.splitlines(True) if "torchao" not in line and "_pytree.py" not in line)


def params(temperature: float = 0.0, seed: int = 0, **kwargs) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, **kwargs).resolve(None)


def processed(logits: Tensor, token_ids: list[int], prompt_len: int, p: SamplingParams, eos: tuple[int, ...]) -> Tensor:
    """[1, V] logits as `p` wants them after `token_ids`: transformers' own processors, and what it has none for."""
    output, ends = torch.tensor(token_ids[prompt_len:], dtype=torch.long), [*eos, *p.stop_token_ids]
    words = [list(word) for word in p.bad_words or ()]
    counts = torch.bincount(output, minlength=logits.shape[1]).float()
    scores = logits_process.RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(torch.tensor([token_ids]), logits)
    scores = scores - p.frequency_penalty * counts
    scores = scores - p.presence_penalty * (counts > 0)
    others: list = []
    if p.logit_bias:
        others.append(logits_process.SequenceBiasLogitsProcessor([[[t], float(b)] for t, b in p.logit_bias]))
    if p.allowed_token_ids:
        left = [t for t in range(logits.shape[1]) if t not in p.allowed_token_ids]
        others.append(logits_process.SuppressTokensLogitsProcessor(left))
    if words:
        others.append(logits_process.NoBadWordsLogitsProcessor(words))
    if p.min_tokens and ends:
        others.append(logits_process.MinNewTokensLengthLogitsProcessor(prompt_len, p.min_tokens, ends))
    for processor in others:
        scores = processor(torch.tensor([token_ids]), scores)
    return scores


@functools.lru_cache(None)
def plain(
    name: str, prompt: tuple[int, ...], new: int, p: SamplingParams, index: int = 0, eos: tuple[int, ...] = ()
) -> list[int]:
    """Prompt and `new` tokens by plain decoding without any cache of ours: transformers' own, or one draw at a time."""
    model = tiny(name)
    ids = torch.tensor([prompt])
    if p.temperature == 0 and not p.adjusted:
        everything = torch.ones_like(ids)  # or generate takes token 0 for padding
        return model.generate(ids, attention_mask=everything, max_new_tokens=new, do_sample=False)[0].tolist()
    seq = Sequence(list(prompt), p, limit=len(prompt) + new, index=index)
    columns = Sampling(*(torch.tensor([v]) for v in (p.temperature, p.top_k, p.top_p, p.min_p, seq.seed)))
    while len(seq) < seq.limit:
        with torch.inference_mode():
            logits = model(torch.tensor([seq.token_ids]), use_cache=False).logits[0, -1:]
            logits = processed(logits, seq.token_ids, len(prompt), p, eos)
        seq.token_ids.append(int(sample(logits, torch.tensor([len(seq)]), columns)[0]))
    return seq.token_ids


class RoundedCache(transformers.DynamicCache):
    """transformers' own cache, whose keys and values go through fp8 of these scales."""

    def __init__(self, config: transformers.PreTrainedConfig, scales: KVScales):
        super().__init__(config=config)
        self.scales = scales

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        each = ((k, self.scales.k[layer_idx]), (v, self.scales.v[layer_idx]))
        return super().update(
            *(_through_fp8(x, scale.to(x)[:, None, None]) for x, scale in each), layer_idx, *args, **kwargs
        )


def _through_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


@functools.lru_cache(None)
def plain_fp8(name: str, prompt: tuple[int, ...], new: int) -> list[int]:
    """Prompt and `new` greedy tokens by transformers' own decoding over fp8 KV."""
    model, ids = tiny(name), torch.tensor([prompt])
    cache = RoundedCache(model.config, scales_for(copy.deepcopy(model)))
    given = {"attention_mask": torch.ones_like(ids), "past_key_values": cache}
    return model.generate(ids, **given, max_new_tokens=new, do_sample=False)[0].tolist()


class Oracle:
    """Drafts from known outputs, shifted by `wrong` token ids: always right at 0, always wrong otherwise."""

    def __init__(self, wrong: int = 0):
        self.wrong, self.known = wrong, []

    def propose(self, rows: DraftRows, k: int) -> tuple[Tensor, Tensor]:
        ids, counts = torch.zeros(len(rows.lengths), k, dtype=torch.long), torch.zeros(len(rows.lengths)).long()
        for r, n in enumerate(rows.lengths.tolist()):
            row, seed = rows.token_ids[r, :n].tolist(), int(rows.seeds[r])
            known = next((t for t, s in self.known if t[:n] == row and s == seed), [])[n : n + k]
            ids[r, : len(known)] = (torch.tensor(known, dtype=torch.long) + self.wrong) % VOCAB
            counts[r] = len(known)
        return ids, counts


class Letters:
    """A tokenizer of one character a token; `broken` is an id that it cannot decode."""

    chat_template = None

    def __init__(self, broken=None):
        self.broken = broken

    def __call__(self, text, **kwargs):
        return {"input_ids": [ord(c) - 33 for c in text]}

    def decode(self, ids, skip_special_tokens=True):
        if self.broken in ids:
            raise KeyError(self.broken)
        return "".join(chr(33 + i) for i in ids)


class Known(Costs):
    """A draft step costs half a plain round; seconds that are measured are left out."""

    def add(self, rows, steps, drafts, seconds):
        super().add(rows, steps, drafts, 1.0 + steps / 2)

    def add_catch_up(self, tokens, seconds):
        super().add_catch_up(tokens, 2.0 + 0.1 * tokens)


DRAFTERS = ("none", "lookup", "same", "near", "random", "right", "wrong")


def drafter_of(kind: str, name: str, pool: KVPool, device="cpu", keep_q=False):
    """One of DRAFTERS for the target `name`: same, near, random are draft models."""
    if kind in ("right", "wrong"):
        return Oracle(int(kind == "wrong"))
    if kind == "lookup":
        return LookupDrafter(min_match=1)
    models = {
        "same": lambda: copy.deepcopy(tiny(name)),
        "near": lambda: copy.deepcopy(tiny(name, noise=0.01)),
        "random": lambda: copy.deepcopy(tiny("llama", seed=5, layers=1)),
    }
    if kind not in models:
        return None
    return ModelDrafter(PagedModel(models[kind]().to(device), pool, "drafter"), vocab_size=VOCAB, keep_q=keep_q)


def engine(
    name: str = "llama",
    drafter: str = "none",
    *,
    k=4,
    rows=4,
    blocks=64,
    block_size=4,
    max_len=96,
    budget=16,
    lag=0,
    device="cpu",
    graphs=False,
    compiled=False,
    verifier="coupled",
    adaptive=False,
    fp8=False,
) -> Engine:
    """An engine over a NaN-poisoned pool; fp8: the target's KV is kept in fp8."""
    pool = KVPool(blocks, block_size, poison=True)
    model = copy.deepcopy(tiny(name))
    scales = scales_for(model) if fp8 else None
    target = PagedModel(model.to(device), pool, "target", compiled=compiled, scales=scales)
    state = Rows(rows, max_len, block_size, target.device, VOCAB)
    config = EngineConfig(k=k, prompt_budget=budget, lag=lag, graphs=graphs, adaptive=adaptive)
    proposer = drafter_of(drafter, name, pool, device, keep_q=verifier != "coupled")
    return Engine(target, VERIFIERS[verifier](VOCAB), state, proposer, config)


class Request:
    """A sequence beside what plain decoding makes of it."""

    def __init__(self, prompt, new=18, p=None, *, name="llama", eos=(), index=0, max_len=96):
        self.p = p or params()
        limit = min(len(prompt) + new, max_len)
        full = plain(name, tuple(prompt), limit - len(prompt), self.p, index, tuple(eos))
        ends = (*eos, *self.p.stop_token_ids)
        end = next((i + 1 for i in range(len(prompt), len(full)) if full[i] in ends), len(full))
        self.full, self.want = full, full[:end]
        self.seq = Sequence(list(prompt), self.p, limit=limit, index=index, eos=tuple(eos))

    def known(self):
        return self.full, self.seq.seed


def odd_after_even(ids, scores):
    """A processor of one's own that depends on the newest token, and writes in place."""
    scores[:, int(ids[0, -1]) % 2 :: 2] -= 4.0
    return scores


class Processed(Request):
    """A request beside plain decoding through the same processors."""

    def __init__(self, prompt, new, p):
        super().__init__(prompt, 1, p)
        self.full = self.want = self._plain(tuple(prompt), new, p)
        self.seq.limit = len(self.full)

    @staticmethod
    @functools.lru_cache(None)
    def _plain(prompt, new, p):
        tokens = list(prompt)
        columns = Sampling(*(torch.tensor([v]) for v in (p.temperature, p.top_k, p.top_p, p.min_p, p.seed)))
        while len(tokens) < len(prompt) + new:
            with torch.inference_mode():
                scores = tiny()(torch.tensor([tokens])).logits[:, -1]
                for processor in p.logits_processors:
                    scores = processor(torch.tensor([tokens]), scores)
            tokens.append(int(sample(scores, torch.tensor([len(tokens)]), columns)[0]))
        return tokens


def submit(engine: Engine, requests: list[Request]) -> list[Request]:
    if isinstance(engine.drafter, Oracle):
        engine.drafter.known += [r.known() for r in requests]
    for request in requests:
        engine.submit(request.seq)
    return requests


def run(engine: Engine, requests: list[Request]) -> list[Request]:
    """Run to the end, checking the invariants after every step, and that every output is plain decoding's."""
    submit(engine, requests)
    finish(engine)
    for request in requests:
        assert_plain(request)
    return requests


def finish(engine: Engine, steps: int = 2000) -> None:
    for _ in range(steps):
        if engine.idle:
            break
        engine.step()
        engine.scheduler.check()
    assert engine.idle, "no progress"
    assert engine.pool.allocator.num_free == engine.pool.num_blocks, "blocks are owned though nothing runs"


def disturbed_step(engine: Engine, rng: random.Random, odds: float) -> None:
    """A step, before which a running row may be cancelled, and another one preempted."""
    running = engine.scheduler.running
    if running and rng.random() < odds:
        engine.cancel(rng.choice(running))
    if running and rng.random() < odds:
        engine.scheduler.preempt(rng.choice(running))
    engine.step()
    engine.scheduler.check()


def assert_plain_until_cancelled(request: Request) -> None:
    if request.seq.finish_reason == "cancelled":
        assert request.seq.token_ids == request.full[: len(request.seq)]
    else:
        assert_plain(request)


def assert_plain(request: Request) -> None:
    assert request.seq.error is None, request.seq.error
    assert request.seq.token_ids == request.want
