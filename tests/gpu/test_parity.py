"""Adjusted logits and log-probabilities on a GPU, in captured rounds: what plain decoding on the CPU gives."""

import copy

import pytest
import torch
from support import engine, run, tiny

from specdec import LLM
from tests.test_adjustments import requests
from tests.test_logprobs import ASKED, PROMPT, check, expected


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafter", ["none", "lookup", "near", "same"])
def test_every_kind_in_one_batch(drafter, graphs, lag):
    e = engine(drafter=drafter, k=3, rows=4, blocks=96, lag=lag, device="cuda", graphs=graphs)
    run(e, requests())
    if graphs:
        assert None not in e.graphs._graphs.values(), "a capture failed"


@pytest.mark.parametrize("graphs", [False, True])
def test_every_token_carries_the_targets_log_probabilities(graphs):
    model = copy.deepcopy(tiny("llama")).cuda()
    with LLM(model, drafter="lookup", k=4, max_rows=4, max_model_len=32, graphs=graphs, compile=False) as llm:
        outputs = llm.generate([PROMPT] * len(ASKED), list(ASKED))
    for output, asked in zip(outputs, ASKED, strict=True):
        if asked.logprobs is not None:
            check(output.logprobs, output.token_ids, expected(output, asked), asked.logprobs)
    with torch.inference_mode():
        want = tiny("llama")(torch.tensor([PROMPT])).logits[0, :-1].double().log_softmax(1)
    check(outputs[-1].prompt_logprobs[1:], PROMPT[1:], want, 4)
