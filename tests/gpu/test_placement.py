"""Weights on a GPU and in the host's memory (accelerate's `device_map`): the tokens are plain decoding's."""

import copy

import accelerate
import pytest
import torch
from support import tiny

import specdec.hf
from specdec import LLM
from tests.model.test_placement import PROMPTS, decoded, plain


def spread(*places) -> torch.nn.Module:
    """The tiny model with its embedding and first layer on the first of two places, the rest on the second one."""
    first, second = places
    names = {"model.embed_tokens": first, "model.layers.0": first, "model.rotary_emb": first}
    rest = {"model.layers.1": second, "model.norm": second, "lm_head": second}
    return accelerate.dispatch_model(copy.deepcopy(tiny()), {**names, **rest}, main_device=0)


def check(model, device: torch.device, drafter=None) -> None:
    """An LLM with the model, and the model enabled: what plain decoding on the CPU gives, from prompts on `device`."""
    with pytest.warns(UserWarning, match="are not all on one device; slower, and without CUDA graphs"):
        llm = LLM(model, drafter=drafter, k=3, max_model_len=64)
    assert llm.engine.graphs is None
    assert decoded(llm) == plain(tiny())
    ids = torch.tensor(PROMPTS[1:], device=device)
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with pytest.warns(UserWarning, match="are not all on one device"), specdec.hf.enable(model, drafter="lookup"):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert out[0, ids.shape[1] :].tolist() == plain(tiny())[1]


@pytest.mark.parametrize("places", [(0, "cpu"), ("cpu", 0)], ids=str)
def test_weights_on_the_gpu_and_in_the_hosts_memory(places):
    for drafter in (None, "lookup", copy.deepcopy(tiny(noise=0.01)).cuda()):
        check(spread(*places), torch.device("cuda", 0), drafter)
