"""Bad input: an error that names the argument, what was expected and what came, and nothing else disturbed."""

import copy

import pytest
import torch
import transformers
from support import COMMON, tiny

from specdec import LLM, SamplingParams
from specdec.draft import check_vocabulary
from specdec.kernels import Sampling, sample


@pytest.fixture(scope="module")
def model():
    return copy.deepcopy(tiny("llama"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": -1}, "k: expected 0 to 1024, got -1"),
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
        ValueError, match="model: MambaForCausalLM can't be paged: its linear_attention layers keep other state than KV"
    ):
        LLM(recurrent)
    uncached = transformers.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match="model: OpenAIGPTLMHeadModel can't be paged: "):
        LLM(transformers.AutoModelForCausalLM.from_config(uncached))
    with pytest.raises(TypeError, match="model: expected a name, a path or a transformers model, got int"):
        LLM(7)


def test_drafters_that_cannot_be_paged(model):
    """It is the drafter that is named, and the model is as it was."""
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ValueError, match="drafter: MambaForCausalLM can't be paged"):
        LLM(model, drafter=transformers.AutoModelForCausalLM.from_config(config))
    sharing = copy.deepcopy(model)
    sharing.model.layers[1] = model.model.layers[1]
    with pytest.raises(ValueError, match="drafter: this LlamaForCausalLM shares layers with a model in use"):
        LLM(model, drafter=sharing)
    with LLM(model, drafter=copy.deepcopy(model), max_rows=1) as llm:
        assert len(llm.generate([1, 2], SamplingParams(max_tokens=2, temperature=0.0))[0].token_ids) == 2


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


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 10**5000},
        {"top_k": -(10**5000)},
        {"temperature": 10**5000},
        {"max_tokens": list(range(10**5))},
        {"max_tokens": 10**5000, "min_tokens": 10**5001},
        {"stop_token_ids": "x" * 10**5},
        {"stop": [["x"] * 10**5]},
        {"stop_token_ids": [10**5000]},
        {"bad_words": [[1] * 10**5]},
        {"logit_bias": list(range(10**5))},
        {"logit_bias": [tuple(range(10**5))]},
    ],
)
def test_what_is_shown_of_parameters_is_short(arguments):
    with pytest.raises((TypeError, ValueError), match=f"^({'|'.join(arguments)}): expected .* got") as raised:
        SamplingParams(**arguments)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(
    "arguments",
    [
        {"k": 10**5000},
        {"k": "x" * 10**5},
        {"max_rows": -(10**5000)},
        {"max_model_len": 10**5000},
        {"dtype": "x" * 10**5},
        {"kv_dtype": "x" * 10**5},
    ],
)
def test_what_is_shown_of_arguments_and_prompts_is_short(model, arguments):
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(arguments))}: .*expected .* got") as raised:
        LLM(model, **arguments)
    assert len(str(raised.value)) < 250
    with LLM(model, max_rows=1) as llm:
        for prompt in ([10**5000], ["x" * 10**5]):
            with pytest.raises((TypeError, ValueError), match="^prompt: expected .* got") as raised:
                llm.submit(prompt)
            assert len(str(raised.value)) < 250


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


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompt: expected a string or a list of token ids, got NoneType"),
        ({"a": 1}, "prompt: expected a string or a list of token ids, got dict"),
        (torch.tensor([1, 2]), "prompt: expected a string or a list of token ids, got Tensor"),
        (("ab", "c"), "prompt: expected token ids .int., got str 'ab'"),
        ([True], "prompt: expected token ids .int., got bool True"),
    ],
)
def test_what_is_no_prompt_and_no_list_of_prompts(model, prompts, message):
    with LLM(model, max_rows=1) as llm, pytest.raises(TypeError, match=message):
        llm.generate(prompts)


BAD_PROMPTS = ([], [97], [-1], [1.5], 7, None, "text", [1] * 128, [1] * 120, {"a": 1}, [[1]], b"ab")


def test_every_bad_request_of_a_list_fails_alone(model):
    """Between good requests of a running batch; their tokens are those of a run without the bad ones."""
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    with LLM(model, max_rows=2, kv_memory=7 * 16 * 2 * 2 * 2 * 16 * 4, drafter="lookup") as llm:
        want = llm.generate([[i, i, i] for i in range(len(BAD_PROMPTS))], greedy)
        mixed = [p for i, bad in enumerate(BAD_PROMPTS) for p in (bad, [i, i, i])]
        outputs = llm.generate(mixed, greedy)
        assert [o.prompt_index for o in outputs] == list(range(len(mixed)))
        for bad in outputs[::2]:
            assert (bad.finish_reason, bad.token_ids, bad.text) == ("error", [], "")
            assert isinstance(bad.error, (TypeError, ValueError))
            assert str(bad.error).startswith("prompt: ")
        assert [o.token_ids for o in outputs[1::2]] == [o.token_ids for o in want]
        assert llm.engine.pool.allocator.num_free == llm.limits.num_blocks


def test_bad_parameters_of_a_list_fail_alone(model):
    good = SamplingParams(max_tokens=4, temperature=0.0)
    with LLM(model, max_rows=2) as llm:
        outputs = llm.generate([[1], [1], [1]], [good, {"max_tokens": 3}, SamplingParams(stop="x")])
        assert [o.finish_reason for o in outputs] == ["length", "error", "error"]
        assert [str(o.error).split(":")[0] for o in outputs[1:]] == ["params", "stop"]


@pytest.mark.parametrize(
    ("model_arguments", "message"),
    [
        ({"dtype": "int8"}, 'dtype: expected "auto", float32, bfloat16 or float16, got'),
        ({"dtype": "bfloat16"}, "dtype: a loaded model keeps its torch.float32; expected that"),
        ({"device": "tpu"}, 'device: expected "auto", "cpu" or "cuda'),
        ({"revision": "main"}, "revision: only a model of the hub has revisions"),
        ({"k": 1.5}, 'k: expected "auto" or an int, got float'),
        ({"k": True}, 'k: expected "auto" or an int, got bool'),
        ({"max_model_len": 0}, "max_model_len: expected at least 1, got 0"),
        ({"max_model_len": "long"}, "max_model_len: expected an int, got str"),
        ({"kv_memory": -5}, "kv_memory: expected at least 1, got -5"),
        ({"kv_memory": 1e9}, "kv_memory: expected an int, got float"),
        ({"block_size": None}, "block_size: expected an int, got NoneType"),
        ({"drafter": torch.nn.Linear(2, 2)}, "drafter: expected None, .*got Linear"),
        ({"compile": "yes"}, 'compile: expected "auto" or a bool, got str'),
    ],
)
def test_more_arguments_of_llm(model, model_arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LLM(model, **model_arguments)
    assert not any("specdec" in name or name == "forward" for module in model.modules() for name in vars(module))


def test_the_vocabulary_of_a_drafter_is_compared_word_by_word(model):
    """With tokenizers on both sides, a different word at one id is a mismatch, whatever the sizes say."""

    class Words:
        def __init__(self, words):
            self.words = words

        def get_vocab(self):
            return self.words

    check_vocabulary(model, model, Words({"a": 0, "b": 1}), Words({"a": 0, "b": 1}))
    with pytest.raises(
        ValueError, match="drafter: expected the target's vocabulary.*2 entries differ, first 'b' at id 1"
    ):
        check_vocabulary(model, model, Words({"a": 0, "b": 1}), Words({"a": 0, "c": 1}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4)}, "logits: expected shape .any, any., got .4."),
        ({"logits": torch.zeros(2, 9).long()}, "logits: expected dtype .*, got torch.int64"),
        ({"logits": torch.zeros(9, 2).t()}, "logits: expected a contiguous last dimension, got strides"),
        ({"positions": torch.zeros(3).long()}, "positions: expected shape .2., got .3."),
        ({"positions": torch.zeros(2)}, "positions: expected dtype .*, got torch.float32"),
        ({"positions": torch.zeros(2, device="meta").long()}, "positions: expected device cpu, got meta"),
        ({"rows": torch.zeros(5).long()}, "rows: expected shape .2., got .5."),
        ({"vocab_size": 10}, "vocab_size: expected 1 to 9, the columns of logits, got 10"),
        ({"temperature": torch.ones(3)}, "temperature: expected shape .2., got .3."),
        ({"seed": torch.ones(2, device="meta").long()}, "seed: expected device cpu, got meta"),
    ],
)
def test_tensors_of_the_sampling_kernel(change, message):
    columns = {"temperature": torch.ones(2), "top_k": torch.zeros(2).int(), "top_p": torch.ones(2)}
    columns |= {"min_p": torch.zeros(2), "seed": torch.zeros(2).long()}
    columns |= {name: value for name, value in change.items() if name in columns}
    rest = {"logits": torch.zeros(2, 9), "positions": torch.zeros(2).long()}
    rest |= {name: value for name, value in change.items() if name not in columns}
    with pytest.raises(ValueError, match=message):
        sample(rest.pop("logits"), rest.pop("positions"), Sampling(**columns), **rest)
