"""Weights that wait on a disk, and drafters in another dtype."""

import copy

import accelerate
import pytest
import torch
from support import tiny

import specdec.hf
from specdec import LLM, SamplingParams
from specdec.model.placement import device_of

PROMPTS = [[5] * 3, [6, 7, 8, 9, 10, 11, 12] * 3]
GREEDY = SamplingParams(max_tokens=8, temperature=0)


def decoded(llm: LLM) -> list[list[int]]:
    with llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def plain(model) -> list[list[int]]:
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return [model.generate(x, attention_mask=torch.ones_like(x), **arguments)[0, x.shape[1] :].tolist() for x in ids]


@pytest.mark.parametrize("layers", [["model", "lm_head"], ["model.layers.0", "lm_head"]], ids=["all", "some"])
def test_weights_on_a_disk(layers, tmp_path):
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    places = {name: "disk" if name.startswith(tuple(layers)) else "cpu" for name in names}
    model = accelerate.dispatch_model(copy.deepcopy(tiny()), places, main_device="cpu", offload_dir=tmp_path)
    assert device_of(model) == torch.device("cpu")
    for drafter in (None, copy.deepcopy(tiny(noise=0.01))):
        with pytest.warns(UserWarning, match="are not all on one device; slower, and without CUDA graphs"):
            llm = LLM(model, drafter=drafter, max_model_len=64)
        assert decoded(llm) == plain(tiny())
    ids = torch.tensor(PROMPTS[1:])
    with pytest.warns(UserWarning, match="are not all on one device"), specdec.hf.enable(model, plain=True):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    assert out[0, ids.shape[1] :].tolist() == plain(tiny())[1]


def test_weights_without_values_are_refused():
    model = copy.deepcopy(tiny())
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"model: expected weights with values, got lm_head.weight on the meta device"):
        LLM(model, max_model_len=64)


def test_a_drafter_in_another_dtype():
    llm = LLM(copy.deepcopy(tiny()), drafter=copy.deepcopy(tiny()).to(torch.bfloat16), k=4, max_model_len=64)
    assert llm.engine.draft_model.model.dtype == torch.bfloat16
    assert decoded(llm) == plain(tiny())
    assert llm.stats.acceptance_rate > 0.5
    wide = copy.deepcopy(tiny()).double()
    with pytest.raises(ValueError, match="drafter: expected weights in float32, bfloat16 or float16, got float64"):
        LLM(copy.deepcopy(tiny()), drafter=wide, max_model_len=64)
