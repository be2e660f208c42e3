"""The attention function behind Hugging Face's AttentionInterface, and the current step that it reads.

Some architectures drop keyword arguments on the way to attention (StableLM, Nemotron), so the step's metadata is one
module-level object, set only around a paged forward. Outside of one the model's own attention runs: we page the call,
not the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, library, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig

from specdec.kernels import AttentionPlan, paged_attention, plan_attention, store_kv
from specdec.kvpool import KVSpec

NAME = "specdec_paged"
"""Not registered with AttentionMaskInterface: transformers then builds no mask, and a paged step needs none."""

_UNSET: Any = object()
_REFUSED = ("position_bias", "indices", "block_indices")
"""Keywords that change the arithmetic in ways this attention doesn't have (T5-like bias, sparse attention)."""


@dataclass(slots=True)
class Step:
    """Metadata of a paged forward: slot_mapping [N] int64, -1 writes nothing; the rest as `paged_attention` has it."""

    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    plan: AttentionPlan
    compiled: bool = False
    calls: int = 0
    ordinals: dict[nn.Module, int] = field(default_factory=dict)
    elsewhere: dict[torch.device, Step] = field(default_factory=dict)

    def on(self, device: torch.device) -> Step:
        """The step for a layer on `device`, copied there once a forward."""
        if self.slot_mapping.device == device:
            return self
        if device not in self.elsewhere:
            table, lens, ends = (t.to(device) for t in (self.block_table, self.seq_lens, self.cu_seqlens_q))
            plan = plan_attention(table, lens, ends, self.max_seqlen_q)
            slots = self.slot_mapping.to(device)
            self.elsewhere[device] = Step(slots, table, lens, ends, self.max_seqlen_q, plan)
        return self.elsewhere[device]


@dataclass(slots=True)
class Recording:
    """In a step's place: notes the KV that each attention call stores, in the order of the calls."""

    calls: list[tuple[nn.Module, KVSpec]] = field(default_factory=list)


class CallKV(NamedTuple):
    """KV of one attention call: k, v [num_blocks, block_size, Hkv, D]; scales [Hkv] fp32 if they are fp8, else None."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(slots=True)
class LayerKV:
    """What an attention module keeps between forwards: the KV of each of its calls, its window where no keyword says it."""

    caches: list[CallKV]
    window: int | None

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of the model is an ordinary model: the KV belongs to the pool of the one in use."""


_here = threading.local()
"""Each thread's own step: an ordinary forward in another thread must not meet it."""

_turn = threading.Lock()
"""One paged forward at a time in a process, because the models' configs are switched for it."""


def _current() -> Any:
    """A Step, a Recording, or another route's own record of its forward; None outside of a paged forward."""
    return getattr(_here, "step", None)


def in_step() -> bool:
    """Whether a paged forward is running in this thread; compiled code runs in no other."""
    return torch.compiler.is_compiling() or not isinstance(_current(), Recording | None)


def in_compiled_step() -> bool:
    """Whether a paged forward is running in this thread that asks for compiled layers."""
    step = _current()
    return isinstance(step, Step) and step.compiled


@contextmanager
def paged(configs: Sequence[PreTrainedConfig], step: Any) -> Iterator[None]:
    """Within it `step` is current, and models of these configs attend through it. Other threads wait for their turn."""
    if _current() is not None:
        raise RuntimeError("a paged forward is running already in this thread; run one at a time")
    with _turn:
        before = [config._attn_implementation_internal for config in configs]
        _here.step = step
        try:
            for config in configs:
                config._attn_implementation_internal = NAME
            yield
        finally:
            _here.step = None
            for config, name in zip(configs, before, strict=True):
                config._attn_implementation_internal = name


def take_turns(module: nn.Module) -> list[RemovableHandle]:
    """Make ordinary forwards of `module` wait while a paged forward runs in another thread, and the other way round.

    Without, one could begin while the configs are switched, get no mask, and go on with the model's own attention.
    The hooks are plain functions, so that a deep copy of the model has nothing of ours to share.
    """
    before = module.register_forward_pre_hook(_take_turn, prepend=True)
    return [before, module.register_forward_hook(_pass_turn, always_call=True)]


def _take_turn(module: nn.Module, args: Any) -> None:
    if _current() is None:
        depth = getattr(_here, "depth", 0)
        if not depth:
            _turn.acquire()
        _here.depth = depth + 1


def _pass_turn(module: nn.Module, args: Any, output: Any) -> None:
    if _current() is None and (depth := getattr(_here, "depth", 0)):
        _here.depth = depth - 1
        if depth == 1:
            _turn.release()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then attend over all that the block tables hold.

    query [1, Hq, N, D]; key [1, Hkv, N, D] and value [1, Hkv, N, Dv] hold the N new tokens only.
    Returns [1, N, Hq, Dv].
    """
    compiling = torch.compiler.is_compiling()
    step = None if compiling else _current()
    if step is None and not compiling:
        raise RuntimeError(f"{type(module).__name__}: an LLM decodes with this model in another thread; wait for it")
    _refuse_unknown(module, attention_mask, kwargs)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if isinstance(step, Recording):
        step.calls.append((module, _spec(module, k, v, len(step.calls))))
        return q.new_zeros(1, q.shape[0], q.shape[1], v.shape[-1]), None
    layer: LayerKV = module.specdec_kv  # type: ignore[assignment]
    kv = layer.caches[_ordinal(module, layer)]
    window = kwargs.get("sliding_window", _UNSET)
    run = torch.ops.specdec.attend if compiling else attend
    out = run(
        q,
        k,
        v,
        kv.k,
        kv.v,
        q.shape[-1] ** -0.5 if scaling is None else scaling,
        layer.window if window is _UNSET else window,
        kwargs.get("softcap"),
        kwargs.get("s_aux", kwargs.get("sinks")),
        kv.k_scale,
        kv.v_scale,
    )
    return out[None], None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """Store k, v and attend, with the current step's metadata: one opaque operation to the compiler.

    The step is read here and not passed, so that compiled layers depend on no tensor of a step but its activations.
    """
    step = _current()
    if not isinstance(step, Step):
        raise RuntimeError(f"a model was set to {NAME!r} outside of a paged forward")
    step.calls += 1
    step = step.on(q.device)
    store_kv(k, v, k_cache, v_cache, step.slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return paged_attention(  # type: ignore[return-value]
        q,
        k_cache,
        v_cache,
        block_table=step.block_table,
        seq_lens=step.seq_lens,
        cu_seqlens_q=step.cu_seqlens_q,
        max_seqlen_q=step.max_seqlen_q,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        plan=step.plan,
    )


_attend_op = library.custom_op("specdec::attend", attend, mutates_args=("k_cache", "v_cache"))


@_attend_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])


def window_of(module: nn.Module) -> int | None:
    """The sliding window of a layer whose code passes none, as transformers' own cache would choose it."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if config is None or index is None:
        return None
    layers = DynamicCache(config=config).layers
    return getattr(layers[index], "sliding_window", None) if index < len(layers) else None


def _spec(module: nn.Module, k: Tensor, v: Tensor, call: int) -> KVSpec:
    return KVSpec(
        key=f"{call}:{getattr(module, 'layer_idx', '')}",
        num_kv_heads=k.shape[1],
        head_dim=k.shape[2],
        v_head_dim=v.shape[2],
        dtype=k.dtype,
        device=k.device,
    )


def _ordinal(module: nn.Module, layer: LayerKV) -> int:
    """Which of the module's calls in this forward this is: looped and split layers call attention several times."""
    step = None if len(layer.caches) == 1 else _current()
    if not isinstance(step, Step):
        return 0
    n = step.ordinals.get(module, 0)
    step.ordinals[module] = n + 1
    return n


def _refuse_unknown(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__}: attention with {name}= is not supported in a paged forward")
    if kwargs.get("is_causal") is False:
        raise ValueError(f"{type(module).__name__}: bidirectional attention is not supported in a paged forward")
    if mask is not None:
        raise ValueError(f"{type(module).__name__}: expected no attention mask, got one of shape {tuple(mask.shape)}")


AttentionInterface.register(NAME, attention)
