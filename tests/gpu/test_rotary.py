"""Models whose angles follow the text's length: their rounds are captured, and the tokens are transformers' own."""

import pytest
import torch
from architectures import model_of

from specdec import LLM, SamplingParams
from tests.model.test_rotary import FOLLOWING, ORIGINAL

PROMPTS = [[5] * 3, [6, 7, 8, 9, 10, 11, 12] * 2]


def own(model, prompt):
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[
        0, ids.shape[1] :
    ].tolist()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FOLLOWING)
def test_rounds_are_captured(name, compiled):
    model = model_of(FOLLOWING[name]())
    want = [own(model, prompt) for prompt in PROMPTS]
    sizes = {"k": 2, "max_model_len": ORIGINAL, "graphs": True, "compile": compiled}
    with LLM(model.to("cuda"), drafter="lookup", **sizes) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0))
            assert [output.token_ids for output in outputs] == want
            llm.reset_prefix_cache()
        assert llm.engine.graphs.captures > 0 and None not in llm.engine.graphs._graphs.values()
