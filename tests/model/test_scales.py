"""KVScales: from magnitudes to powers of two, to a file and back, calibrated, refused."""

import copy

import pytest
import torch
from support import VOCAB, RoundedCache, engine, tiny

from specdec import LLM
from specdec.kvpool import KVPool
from specdec.model import KVScales, PagedModel, kv_specs, scales_for
from specdec.model.scales import FP8_MAX, HEADROOM, refuse_without_fp8, stored_as
from tests.model.test_paged import packed_of

TEXT = [7, 8, 9, 10, 4, 9, 4, 9] * 4


def magnitudes(model, text):
    """The largest |k| and |v| [Hkv] of every layer, by transformers' own cache."""
    cache = model(torch.tensor([text]), use_cache=True).past_key_values
    return [[x.abs().amax((0, 2, 3)) for x in (layer.keys, layer.values)] for layer in cache.layers]


@torch.inference_mode()
def test_calibration_leaves_headroom_by_powers_of_two():
    model = copy.deepcopy(tiny())
    scales = scales_for(model, [TEXT[:3], TEXT])
    for i, pair in enumerate(magnitudes(model, TEXT)):
        for most, scale in zip(pair, (scales.k[i], scales.v[i]), strict=True):
            assert torch.equal(scale.log2(), scale.log2().round())
            assert (most / scale <= FP8_MAX / HEADROOM).all()
            assert (most / scale > FP8_MAX / HEADROOM / 2).all(), "a text is forgotten, or a head has another's scale"


def test_a_long_text_is_calibrated_in_chunks(monkeypatch):
    whole = scales_for(copy.deepcopy(tiny()), [TEXT])
    monkeypatch.setattr("specdec.model.calibration._CHUNK", 5)
    chunked = scales_for(copy.deepcopy(tiny()), [TEXT])
    assert all(torch.equal(a, b) for a, b in zip((*whole.k, *whole.v), (*chunked.k, *chunked.v), strict=True))


def test_a_head_of_zeros_has_a_scale():
    scales = KVScales.of([torch.tensor([0.0, 1e-30])], [torch.tensor([448.0, 3e4])])
    assert scales.k[0][0] == 1 and scales.k[0][1] > 0
    assert scales.v[0].tolist() == [HEADROOM, 512.0]
    with pytest.raises(ValueError, match="kv_scales: expected finite v in calibration, got nan in attention call 0"):
        KVScales.of([torch.ones(1)], [torch.tensor([float("nan")])])


def test_a_file_holds_them_all(tmp_path):
    scales, file = scales_for(copy.deepcopy(tiny("gemma2"))), tmp_path / "scales.json"
    scales.save(file)
    again = scales_for(None, str(file))
    assert all(torch.equal(a, b) for a, b in zip((*scales.k, *scales.v), (*again.k, *again.v), strict=True))
    for broken in ("", "[1]", '{"k": [[1]]}', '{"k": [[1]], "v": []}', '{"k": [["a"]], "v": [[1]]}'):
        file.write_text(broken)
        with pytest.raises(ValueError, match="kv_scales: expected"):
            KVScales.load(file)


def test_what_does_not_fit_is_refused_and_leaves_nothing():
    model, specs = copy.deepcopy(tiny()), kv_specs(tiny())
    right, ones = scales_for(model), torch.ones(2)
    for wrong in (
        KVScales((ones,), (ones,)),
        KVScales((torch.ones(3),) * 2, (ones,) * 2),
        KVScales((ones, ones * 0), (ones,) * 2),
        KVScales((), ()),
    ):
        with pytest.raises(ValueError, match=r"kv_scales: expected numbers above 0 for 2 attention calls of \[2\] KV"):
            LLM(model, kv_dtype="fp8", kv_scales=wrong)
    for wish, kind, message in (
        ([], ValueError, "kv_scales: expected texts of at least one token each, got 0"),
        ([[1], []], ValueError, "kv_scales: expected texts of at least one token each, got 2"),
        (["a text"], ValueError, "kv_scales: texts need a tokenizer"),
        ([[1, VOCAB]], ValueError, "kv_scales: expected token ids in 0..96, got 97"),
        ([[1.5]], ValueError, "kv_scales: expected token ids in 0..96, got 1.5"),
        (7, TypeError, "kv_scales: expected None, KVScales, a file of them or a list of texts, got int"),
    ):
        with pytest.raises(kind, match=message):
            LLM(model, kv_dtype="fp8", kv_scales=wish)
    with pytest.raises(ValueError, match='kv_scales: expected kv_dtype="fp8" beside them'):
        LLM(model, kv_scales=right)
    with pytest.raises(ValueError, match="drafter_kv_dtype: expected a draft model beside it, got 'lookup'"):
        LLM(model, drafter="lookup", drafter_kv_dtype="fp8")
    for wrong in ("fp4", torch.bfloat16, None, 8):
        with pytest.raises(ValueError, match='kv_dtype: expected "auto", "fp8" or the model\'s own torch.float32, got'):
            LLM(model, kv_dtype=wrong)
    assert stored_as(specs, torch.float32) == specs
    with pytest.raises(
        ValueError, match="kv_dtype: fp8 needs a GPU of compute capability 8.9 or newer, cuda:0 has 8.6"
    ):
        refuse_without_fp8("kv_dtype", torch.device("cuda:0"), (8, 6))
    refuse_without_fp8("kv_dtype", torch.device("cuda:0"), (8, 9))
    assert not any(hasattr(module, "specdec_kv") for module in model.modules())


def test_a_model_in_use_is_not_calibrated():
    e = engine()
    with pytest.raises(ValueError, match="in use by another LLM"):
        LLM(e.target.model, kv_dtype="fp8")


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("cuts", [(19,), (7, 8, 15, 16, 19)])
def test_ragged_chunks_give_the_whole_texts_logits(name, cuts):
    """Of transformers' own forward over fp8 KV: what a chunk sees of itself is rounded as what is before it."""
    model, generator = copy.deepcopy(tiny(name)), torch.Generator().manual_seed(3)
    texts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (19, 5, 1)]
    scales = scales_for(model)
    want = [model(torch.tensor([t]), past_key_values=RoundedCache(model.config, scales)).logits[0] for t in texts]
    paged = PagedModel(model, KVPool(24, 4, poison=True), "target", scales=scales)
    tables, got, start = torch.randperm(24, generator=generator).view(3, 8).int(), [[] for _ in texts], 0
    for end in cuts:
        chunks = [(r, t, start, min(end, len(t))) for r, t in enumerate(texts) if start < len(t)]
        parts = paged.extend(packed_of(chunks, tables)).split([b - a for _, _, a, b in chunks])
        for (row, *_), part in zip(chunks, parts, strict=True):
            got[row].append(part)
        start = end
    for parts, whole in zip(got, want, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)
    paged.close()
