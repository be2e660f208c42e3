"""Angles that follow the text's length: a paged forward asks the host nothing and has those of the original positions."""

import copy
import functools
from contextlib import ExitStack

import pytest
import torch
import transformers
from architectures import PAGED, model_of
from support import COMMON, CONFIGS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from specdec.kvpool import KVPool
from specdec.model import PagedModel, attention
from tests.model.test_paged import BLOCK_SIZE, WIDTH, packed_of

ORIGINAL = 24
LONG = torch.arange(1, 61)[None]
FACTORS = {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": ORIGINAL}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **FACTORS}
SHORT = {**COMMON, "max_position_embeddings": ORIGINAL}
FOLLOWING = {
    "dynamic": lambda: transformers.LlamaConfig(**SHORT, rope_parameters=DYNAMIC),
    "longrope": lambda: transformers.Phi3Config(
        **{**COMMON, "max_position_embeddings": 96}, original_max_position_embeddings=ORIGINAL, rope_parameters=LONGROPE
    ),
    "one for each type of layer": lambda: transformers.Gemma3TextConfig(
        **SHORT,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": DYNAMIC},
    ),
}
SHAPED_BY_NUMBERS = ("aten.nonzero", "aten.masked_select", "aten.unique", "aten._unique", "aten.repeat_interleave")


class NoLooks(TorchDispatchMode):
    """Fails where the host needs a number that is on the device, or a shape that depends on one.

    It sees operations: not `tolist`, which on a CPU is none.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            if (done := func.decompose(*args, **kwargs)) is not NotImplemented:
                return done
        masks = str(func) == "aten.index.Tensor" and any(i is not None and i.dtype == torch.bool for i in args[1])
        looks = torch.Tag.data_dependent_output in func.tags or str(func).startswith(SHAPED_BY_NUMBERS) or masks
        assert not looks, f"a paged forward looked at numbers: {func}"
        return func(*args, **kwargs)


def unwatched(function):
    def run(*args):
        with _disable_current_modes():
            return function(*args)

    return run


@pytest.fixture
def page(monkeypatch):
    """Pages a model until the test ends. Its attention is not watched: on a CPU the kernels' torch twins run, which look."""
    monkeypatch.setattr(attention, "attend", unwatched(attention.attend))
    with ExitStack() as opened:

        def make(model, **options):
            paged = PagedModel(model, KVPool(3 * WIDTH, BLOCK_SIZE, poison=True), "target", **options)
            opened.callback(paged.close)
            return paged

        yield make


TABLES = torch.arange(3 * WIDTH).view(3, WIDTH).int()
TEXTS = [[1 + (7 * i + r) % 90 for i in range(n)] for r, n in enumerate((19, 5, 1))]


def whole(texts):
    return packed_of([(r, text, 0, len(text)) for r, text in enumerate(texts)], TABLES)


@torch.inference_mode()
@pytest.mark.parametrize("name", [*FOLLOWING, *PAGED, *CONFIGS])
def test_a_paged_forward_looks_at_no_number(page, name):
    """Or no CUDA graph could hold it."""
    paged = page(model_of({**FOLLOWING, **PAGED, **CONFIGS}[name]()))
    with NoLooks():
        paged.extend(whole(TEXTS))


def test_what_looks_is_seen():
    for look in (torch.Tensor.item, bool, torch.nonzero, torch.where, torch.unique, lambda x: x[x > 0]):
        with torch.inference_mode(), NoLooks(), pytest.raises(AssertionError, match="looked"):
            look(torch.ones(1))


@torch.inference_mode()
@pytest.mark.parametrize("name", FOLLOWING)
def test_tokens_are_the_models_own(page, name):
    """Of a ragged batch, from its prompts to the last of the original positions."""
    paged = page(model_of(FOLLOWING[name]()))
    texts, new = copy.deepcopy(TEXTS), ORIGINAL - len(TEXTS[0])
    packed = whole(texts)
    for _ in range(new):
        last = packed.cu_seqlens_q[1:].long() - 1
        for text, token in zip(texts, paged.extend(packed)[last].argmax(-1).tolist(), strict=True):
            text.append(token)
        packed = packed_of([(r, text, len(text) - 1, len(text)) for r, text in enumerate(texts)], TABLES)
    for text, got in zip(TEXTS, texts, strict=True):
        ids = torch.tensor([text])
        want = paged.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        assert got == want[0].tolist()


@torch.inference_mode()
def test_compiled_modules_keep_to_them(page, monkeypatch):
    """Between ordinary forwards of any length, without compiling anew. Traced only: the inductor takes 20 seconds."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    paged = page(model_of(FOLLOWING["one for each type of layer"]()), compiled=True)
    want = torch.cat([paged.model(torch.tensor([text])).logits[0] for text in TEXTS])
    for recompile in (True, False):
        with torch._dynamo.config.patch(error_on_recompile=not recompile):
            torch.testing.assert_close(paged.extend(whole(TEXTS)), want, rtol=1e-4, atol=1e-4)
        paged.model(LONG)


@torch.inference_mode()
def test_past_the_original_positions_the_angles_stay(page):
    """Of a draft model, which may get there: no row changes what another one, or its own cached keys, mean."""
    paged = page(model_of(FOLLOWING["dynamic"]()))
    short, long = TEXTS[1], LONG[0, :30].tolist()
    got = paged.extend(whole([short, long])).split([len(short), len(long)])
    fixed = model_of(transformers.LlamaConfig(**SHORT))
    for text, logits in zip([short, long], got, strict=True):
        torch.testing.assert_close(logits, fixed(torch.tensor([text])).logits[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", FOLLOWING)
def test_ordinary_forwards_are_as_without_paged_ones(name):
    """Also those whose angles follow an earlier one's length."""
    plain = model_of(FOLLOWING[name]())
    model = copy.deepcopy(plain)

    def same(*lengths):
        for n in lengths:
            torch.testing.assert_close(model(LONG[:, :n]).logits, plain(LONG[:, :n]).logits, rtol=1e-5, atol=1e-5)

    same(60)
    paged = PagedModel(model, KVPool(3 * WIDTH, BLOCK_SIZE, poison=True), "target")
    same(40)
    paged.extend(whole(TEXTS))
    same(40, 10)
    paged.extend(whole(TEXTS))
    same(40)
    paged.extend(whole(TEXTS))
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(LONG[:, :30]).logits, plain(LONG[:, :30]).logits, rtol=1e-5, atol=1e-5)
    same(30)
    paged.close()
    same(30, 10, 60)
