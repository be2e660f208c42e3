"""Bad input: an error that names the argument, what was expected and what came, and nothing else disturbed."""

import copy

import pytest
import transformers
from support import COMMON, tiny

from specdec import LLM, SamplingParams


@pytest.fixture(scope="module")
def model():
    return copy.deepcopy(tiny("llama"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": -1}, "k: expected at least 0, got -1"),
        ({"k": "many"}, 'k: expected "auto" or an int, got str'),
        ({"drafter": 7}, 'drafter: expected None, "lookup", a model or an object with propose.*got int'),
        ({"drafter": "no-such-drafter"}, 'drafter: expected None, "lookup" or a model; '),
        ({"max_rows": 0}, "max_rows: expected at least 1, got 0"),
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"max_model_len": 129}, "max_model_len: expected at most 128, the model's positions, got 129"),
        ({"kv_memory": 100}, "kv_memory: expected at least .* bytes, one block of KV, got 100"),
        ({"graphs": True}, "graphs: CUDA graphs need a GPU"),
        ({"graphs": 3}, 'graphs: expected "auto" or a bool, got int'),
    ],
)
def test_arguments_of_llm(model, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LLM(model, **arguments)
    with LLM(model, max_rows=1) as llm:  # the model is as it was
        assert len(llm.generate([1, 2], SamplingParams(max_tokens=2, temperature=0.0))[0].token_ids) == 2


def test_models_that_cannot_be_paged():
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    recurrent = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError, match="model: MambaForCausalLM has linear_attention layers, whose state can't be rolled"
    ):
        LLM(recurrent)
    bloom = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match="model: BloomForCausalLM does not attend through transformers' Attention"):
        LLM(transformers.AutoModelForCausalLM.from_config(bloom))
    with pytest.raises(TypeError, match="model: expected a name, a path or a transformers model, got int"):
        LLM(7)


def test_a_drafter_with_another_vocabulary(model):
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**COMMON, "vocab_size": 4000}))
    with pytest.raises(ValueError, match="drafter: expected a vocabulary of 97 tokens, the target's, got 4000"):
        LLM(model, drafter=other)
    padded = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**COMMON, "vocab_size": 128}))
    with LLM(model, drafter=padded, k=2, max_rows=1) as llm:
        drafted = llm.generate([1, 2, 3], SamplingParams(max_tokens=9, temperature=1.0, seed=1))[0]
        plain = llm.generate([1, 2, 3], SamplingParams(max_tokens=9, temperature=1.0, seed=1, k=0))[0]
        assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: expected at least one token, got an empty prompt"),
        ([1, 97], "prompt: expected token ids in 0..96, got 97"),
        ([-1], "prompt: expected token ids in 0..96, got -1"),
        ([1.5], "prompt: expected token ids .int., got float 1.5"),
        (7, "prompt: expected a string or a list of token ids, got int"),
        ("text", "prompt: this model came without a tokenizer; pass tokenizer= or token ids"),
        ([1] * 128, "prompt: expected at most 127 tokens .*, got 128"),
    ],
)
def test_prompts(model, prompt, message):
    with LLM(model, max_rows=1) as llm, pytest.raises((TypeError, ValueError), match=message):
        llm.submit(prompt)


def test_a_prompt_longer_than_the_pool(model):
    with LLM(model, max_rows=1, kv_memory=3 * 16 * 2 * 2 * 2 * 16 * 4) as llm:
        assert llm.limits.num_blocks == 3
        with pytest.raises(
            ValueError, match="prompt: 60 tokens and up to 5 more need 64 KV slots, expected at most 48"
        ):
            llm.submit([1] * 60, SamplingParams(max_tokens=5))
        assert len(llm.generate([1] * 40, SamplingParams(max_tokens=5, temperature=0.0))[0].token_ids) == 5


def test_parameters_of_a_request(model):
    with LLM(model, max_rows=1) as llm:
        with pytest.raises(TypeError, match="params: expected SamplingParams, got dict"):
            llm.submit([1], {"max_tokens": 3})
        with pytest.raises(ValueError, match="stop: stop strings need a tokenizer"):
            llm.submit([1], SamplingParams(stop="x"))
        with pytest.raises(ValueError, match="params: expected one for each of 2 prompts, got 1"):
            llm.generate([[1], [2]], [SamplingParams()])
        with pytest.raises(ValueError, match="messages: this model's tokenizer has no chat template"):
            llm.chat([{"role": "user", "content": "hello"}])
