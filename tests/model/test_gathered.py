"""Models with attention of their own, decoded over blocks with drafts: transformers' greedy tokens, token for token."""

import copy
import functools

import pytest
import torch
import transformers
from architectures import APART, GATHERED, model_of
from support import tiny

from specdec import LLM, SamplingParams

CONFIGS = {**GATHERED, **APART}
NAMES = ("ALiBi", "positions counted for a batch")
NEW = 14


@functools.cache
def texts(name: str) -> tuple[transformers.PreTrainedModel, list[list[int]], list[list[int]]]:
    """A model, prompts of several lengths, and what transformers makes of each alone."""
    model = model_of(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (n,), generator=draw).repeat(3).tolist() for n in (1, 7, 4)]
    ids = [torch.tensor([prompt]) for prompt in prompts]
    arguments = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    outs = [model.generate(x, attention_mask=torch.ones_like(x), **arguments)[0, x.shape[1] :] for x in ids]
    return model, prompts, [out.tolist() for out in outs]


@pytest.mark.parametrize("drafter", ["lookup", "same", "paged"])
@pytest.mark.parametrize("name", NAMES)
def test_speculative_decoding_is_plain_decoding(name, drafter):
    model, prompts, want = texts(name)
    drafters = {"lookup": "lookup", "same": copy.deepcopy(model), "paged": copy.deepcopy(tiny())}
    with pytest.warns(UserWarning, match=f"{type(model).__name__} runs gathered.* slower, and without CUDA graphs"):
        llm = LLM(copy.deepcopy(model), drafter=drafters[drafter], max_model_len=64, prompt_budget=8)
    with llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=NEW, temperature=0))
        assert [out.token_ids for out in outputs] == want
        if drafter == "same":
            assert llm.stats.acceptance_rate == 1.0
        again = llm.generate(prompts, SamplingParams(max_tokens=NEW, temperature=0))  # on cached prefixes
        assert [out.token_ids for out in again] == want


def test_a_paged_target_takes_a_gathered_drafter():
    prompts = texts("ALiBi")[1]
    with LLM(copy.deepcopy(tiny()), max_model_len=64) as llm:
        want = [out.token_ids for out in llm.generate(prompts, SamplingParams(max_tokens=NEW, temperature=0))]
    with pytest.warns(UserWarning, match="BloomForCausalLM runs gathered") as told:
        llm = LLM(copy.deepcopy(tiny()), drafter=copy.deepcopy(texts("ALiBi")[0]), max_model_len=64)
    with llm:
        got = llm.generate(prompts, SamplingParams(max_tokens=NEW, temperature=0))
        assert [out.token_ids for out in got] == want
    assert [warning.filename for warning in told] == [__file__], "the line of whoever made the LLM is named"


def test_the_model_object_stays_itself():
    model, prompts, want = texts("ALiBi")
    model = copy.deepcopy(model)
    ids = torch.tensor(prompts[1:2])
    logits = model(ids).logits
    with pytest.warns(UserWarning, match="gathered"):
        llm = LLM(model, max_model_len=64)
    with llm:
        llm.generate(prompts)
        with pytest.raises(ValueError, match="in use by another LLM"):
            LLM(model, max_model_len=64)
        assert torch.equal(model(ids).logits, logits)
        with pytest.raises(ValueError, match="layers: BloomForCausalLM runs gathered, its states can't be tapped"):
            llm.engine.target.tap([0])
    with pytest.warns(UserWarning, match="gathered"):
        llm = LLM(model, max_model_len=64)
    with llm:
        assert llm.generate(prompts[1], SamplingParams(max_tokens=NEW, temperature=0))[0].token_ids == want[1]
