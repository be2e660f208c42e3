"""Two GPUs of one host: a model spread over them, drafter and target on one each, a target that is not on the first."""

import copy

import pytest
import torch
from support import tiny

import specdec.hf
from specdec import LLM
from tests.gpu.test_placement import check, spread
from tests.model.test_placement import GREEDY, PROMPTS, decoded, plain

ARGUMENTS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("places", [(0, 1), (1, 0)], ids=str)
def test_a_model_over_two_gpus(places):
    for drafter in ("lookup", copy.deepcopy(tiny(noise=0.01)).to("cuda:1")):
        check(spread(*places), torch.device("cuda", 0), drafter)


@pytest.mark.parametrize("places", [(0, 1), (1, 0)], ids=str)
def test_drafter_and_target_on_one_each(places):
    target, drafter = (copy.deepcopy(tiny()).to(torch.device("cuda", place)) for place in places)
    llm = LLM(target, drafter=drafter, k=3, max_model_len=64)
    assert llm.engine.graphs is None and llm.engine.draft_model.device != llm.engine.target.device
    assert decoded(llm) == plain(tiny())
    assert llm.stats.accepted == llm.stats.drafted > 0
    ids = torch.tensor(PROMPTS[1:] * 2, device=target.device)
    with specdec.hf.enable(target, k=3) as enabled:
        out = target.generate(ids, attention_mask=torch.ones_like(ids), **ARGUMENTS, assistant_model=drafter)
        assert enabled.stats.accepted > 0
    assert out[:, ids.shape[1] :].tolist() == [plain(tiny())[1]] * 2


@pytest.mark.parametrize("lag", [0, 1])
def test_a_target_that_is_not_on_the_first_gpu(lag):
    """Its streams, events and graphs are its own GPU's, whichever the caller's current one is."""
    target, drafter = (copy.deepcopy(tiny()).to("cuda:1") for _ in range(2))
    assert torch.cuda.current_device() == 0
    llm = LLM(target, drafter=drafter, k=3, max_model_len=64, lag=lag, graphs=True)
    with llm:
        for _ in range(3):
            assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == plain(tiny())
            llm.reset_prefix_cache()
        assert llm.engine.graphs.captures > 0 and None not in llm.engine.graphs._graphs.values()
        assert llm.stats.accepted == llm.stats.drafted > 0
