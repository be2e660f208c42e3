"""Log-probabilities of outputs and prompts: those of the model's own forward over the finished text, whoever drafts."""

import copy

import pytest
import torch
from support import VOCAB, Letters, Oracle, params, plain, processed, tiny

from specdec import LLM, SamplingParams
from specdec.distribution import log_weights
from specdec.kernels import Sampling
from specdec.logprobs import read, width

PROMPT = [1, 2, 3, 1, 2, 3, 1]
ASKED = (
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=0, repetition_penalty=1.4),
    SamplingParams(max_tokens=7, temperature=0.0),
    SamplingParams(max_tokens=11, temperature=0.8, seed=3, top_k=6, logprobs=8, processed_logprobs=True),
    SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, processed_logprobs=True, presence_penalty=2.0),
    SamplingParams(max_tokens=5, temperature=1.0, seed=4, logprobs=20, prompt_logprobs=4),
)


@pytest.fixture(scope="module")
def model():
    return copy.deepcopy(tiny("llama"))


def expected(output, asked):
    """[tokens, V] log-probabilities after each prefix, from one plain forward."""
    ids, n = output.prompt_token_ids + output.token_ids, len(output.prompt_token_ids)
    with torch.inference_mode():
        logits = tiny("llama")(torch.tensor([ids])).logits[0, n - 1 : -1]
    if not asked.processed_logprobs:
        return logits.double().log_softmax(1)
    p = params(asked.temperature, top_k=asked.top_k, presence_penalty=asked.presence_penalty)
    rows = [processed(x[None], ids[: n + i], n, p, ()) for i, x in enumerate(logits)]
    columns = Sampling(*(torch.tensor([v] * len(rows)) for v in (p.temperature, p.top_k, p.top_p, p.min_p, 0)))
    logits = torch.cat(rows)
    return (log_weights(logits, columns) if p.temperature else logits).double().log_softmax(1)


def check(logprobs, token_ids, want, top):
    assert [entry.token_id for entry in logprobs] == token_ids
    for entry, line in zip(logprobs, want, strict=True):
        assert entry.logprob == pytest.approx(float(line[entry.token_id]), abs=1e-4)
        values, ids = line.topk(top)
        alive = int((values > -torch.inf).sum())
        assert [i for i, _ in entry.top] == ids[:alive].tolist()
        assert [x for _, x in entry.top] == pytest.approx(values[:alive].tolist(), abs=1e-4)


@pytest.mark.parametrize(("drafter", "lag"), [(None, 0), ("lookup", 2), ("right", 1)])
def test_every_token_carries_the_targets(model, drafter, lag):
    if drafter == "right":
        drafter = Oracle()
        for asked in ASKED:
            p = asked.resolve(None)
            drafter.known.append((plain("llama", tuple(PROMPT), p.max_tokens, p), p.seed if asked.seed else 0))
    with LLM(model, drafter=drafter, k=4 if drafter else "auto", max_rows=4, max_model_len=32, lag=lag) as llm:
        outputs = llm.generate([PROMPT] * len(ASKED), list(ASKED))
        again = llm.generate([PROMPT], [ASKED[-1]])[0]
    for output, asked in zip(outputs, ASKED, strict=True):
        if asked.logprobs is None:
            assert output.logprobs is None
            continue
        check(output.logprobs, output.token_ids, expected(output, asked), asked.logprobs)
    assert all(o.prompt_logprobs is None for o in outputs[:-1])
    for output in (outputs[-1], again):  # the second time its prompt is cached, and run all the same
        with torch.inference_mode():
            want = tiny("llama")(torch.tensor([PROMPT])).logits[0, :-1].double().log_softmax(1)
        assert output.prompt_logprobs[0] is None
        check(output.prompt_logprobs[1:], PROMPT[1:], want, 4)


def test_pieces_carry_theirs_and_nothing_past_a_stop(model):
    full = plain("llama", tuple(PROMPT), 24, params())
    text = Letters().decode(full[len(PROMPT) :])
    oracle = Oracle()
    oracle.known.append((full, 0))
    asked = SamplingParams(max_tokens=24, temperature=0.0, seed=0, logprobs=1, stop=text[9:11])
    with LLM(model, tokenizer=Letters(), drafter=oracle, k=7, max_rows=1, max_model_len=64) as llm:
        handle = llm.submit(PROMPT, asked)
        pieces, output = list(handle), handle.result()
    assert [t for p in pieces for t in p.token_ids] == output.token_ids
    assert [entry for p in pieces for entry in p.logprobs] == output.logprobs
    check(output.logprobs, output.token_ids, expected(output, asked), 1)


def test_prompts_in_chunks_preempted_and_forked(model):
    """Small chunks, few blocks, three samples of each prompt: the log-probabilities of each prompt are whole."""
    prompts = [[i, *PROMPT, 5, 6, 7, i] for i in range(3)]
    asked = SamplingParams(max_tokens=9, temperature=1.0, seed=1, n=2, prompt_logprobs=0)
    options = dict(max_rows=4, max_model_len=32, block_size=4, prompt_budget=5, drafter="lookup")
    size = 4 * 2 * 2 * 2 * 16 * 4  # bytes of a block: slots, K and V, layers, heads, head dim, fp32
    with LLM(model, kv_memory=9 * size, **options) as llm:
        outputs = llm.generate(prompts, asked)
        assert llm.engine.scheduler.preemptions > 0
    for output in outputs:
        with torch.inference_mode():
            want = tiny("llama")(torch.tensor([output.prompt_token_ids])).logits[0, :-1].double().log_softmax(1)
        check(output.prompt_logprobs[1:], output.prompt_token_ids[1:], want, 0)


def test_a_prompt_of_one_token_and_nothing_asked(model):
    with LLM(model, max_rows=1, max_model_len=16) as llm:
        output = llm.generate([5], SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1))
    assert (output[0].prompt_logprobs, output[0].logprobs) == ([None], None)


def test_what_a_round_reports():
    assert width([None, None]) is None
    assert [width([None, n]) for n in (0, 1, 5, 6, 20)] == [0, 5, 5, 20, 20]
    lines = [[-0.5, 7.0, 8.0, 9.0, -0.5, -1.0, float("-inf")]]
    assert read(lines, [7], 3) == [(7, -0.5, ((7, -0.5), (8, -1.0)))]
    assert read(lines, [7], 1)[0].top == ((7, -0.5),)
    assert VOCAB > 20
