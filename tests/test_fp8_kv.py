"""KV in fp8, end to end: what transformers decodes over fp8 KV, token for token, with drafts and without."""

import copy

import pytest
import torch
from support import Request, engine, finish, params, plain_fp8, submit, tiny

import specdec.hf
from specdec import LLM, SamplingParams
from specdec.kvpool import KVPool
from specdec.model import kv_specs
from specdec.sequence import Sequence
from tests.model.test_gathered import texts as gathered

PROMPTS = [[5], [7, 8, 9, 10], [4, 9, 4, 9, 4, 9, 4, 9, 4], [1, 2, 3] * 7]
NEW = 12
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)


class Request8(Request):
    """A greedy request beside what transformers makes of it over fp8 KV."""

    def __init__(self, prompt, name="llama"):
        self.full = self.want = plain_fp8(name, tuple(prompt), NEW)
        self.seq = Sequence(list(prompt), params(), limit=len(prompt) + NEW)


def run(e, name="llama"):
    assert all(t.dtype == torch.float8_e4m3fn for pair in e.pool.kv("target") for t in pair)
    each = submit(e, [Request8(p, name) for p in PROMPTS])
    finish(e)
    for r in each:
        assert r.seq.error is None
        assert r.seq.token_ids == r.want


@pytest.mark.parametrize(("drafter", "lag"), [("none", 0), ("lookup", 0), ("near", 1)])
def test_tokens_are_plain_decodings(drafter, lag):
    e = engine(drafter=drafter, k=3, lag=lag, budget=8, fp8=True)
    run(e)
    run(e)  # on cached prefixes
    assert (e.stats.accepted > 0) == (drafter != "none")


def test_windows_and_soft_caps():
    run(engine("gemma2", "lookup", k=3, fp8=True), "gemma2")


def test_preemption():
    e = engine(drafter="near", k=4, blocks=14, fp8=True)
    run(e)
    assert e.scheduler.preemptions > 0


def test_a_copy_of_the_target_as_drafter_is_right_where_its_kv_is_rounded_too():
    model, asked = tiny(), SamplingParams(max_tokens=NEW, temperature=1.0, seed=3)
    with LLM(copy.deepcopy(model), kv_dtype="fp8", max_model_len=64) as llm:
        want = [out.token_ids for out in llm.generate(PROMPTS, asked)]
    for drafters, exact in (("auto", False), ("fp8", True)):
        with LLM(
            copy.deepcopy(model), drafter=copy.deepcopy(model), k=3, kv_dtype="fp8", drafter_kv_dtype=drafters,
            max_model_len=64,
        ) as llm:  # fmt: skip
            assert [out.token_ids for out in llm.generate(PROMPTS, asked)] == want
            assert (llm.stats.acceptance_rate == 1.0) == exact


def test_models_with_attention_of_their_own():
    model, prompts, own = gathered("ALiBi")
    outputs = []
    for drafter in (None, "lookup"):
        with pytest.warns(UserWarning, match="runs gathered"):
            llm = LLM(copy.deepcopy(model), drafter=drafter, k=3, max_model_len=64, prompt_budget=8, kv_dtype="fp8")
        with llm:
            outputs.append([out.token_ids for out in llm.generate(prompts, GREEDY)])
    assert outputs[0] == outputs[1]
    assert outputs[0] != own, "is it there?"


def test_the_pool_holds_more_tokens_and_scales_can_be_given(tmp_path):
    model, memory = copy.deepcopy(tiny()), 1 << 15
    sizes = [KVPool.bytes_per_block_of(kv_specs(model, kind), 16) for kind in ("auto", torch.float8_e4m3fn)]
    assert sizes[0] == sizes[1] * model.dtype.itemsize
    with LLM(model, kv_dtype="fp8", kv_memory=memory, max_model_len=64) as llm:
        assert llm.limits.num_blocks == memory // sizes[1]
        llm.kv_scales.save(tmp_path / "scales.json")
        want = [out.token_ids for out in llm.generate(PROMPTS, GREEDY)]
    assert want == [plain_fp8("llama", tuple(p), NEW)[len(p) :] for p in PROMPTS]
    with LLM(model, kv_dtype="fp8", kv_scales=tmp_path / "scales.json", max_model_len=64) as llm:
        assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY)] == want


def test_generate_of_transformers():
    model = copy.deepcopy(tiny())
    prompt = torch.tensor([PROMPTS[2], PROMPTS[3][:9]])
    with pytest.raises(ValueError, match="kv_dtype: expected"):
        specdec.hf.enable(model, kv_dtype="fp4")
    with specdec.hf.enable(model, kv_dtype="fp8", plain=True) as enabled:
        for asked in ({}, {"prompt_lookup_num_tokens": 3}):
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW, **asked
            )
            assert out.tolist() == [plain_fp8("llama", tuple(row), NEW) for row in prompt.tolist()]
        assert enabled.session.llm.kv_scales is not None
