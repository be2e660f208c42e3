"""What has no paged form is named, never ignored: transformers decodes a plain call then, an assisted batch is refused."""

import copy
import warnings

import pytest
import torch
import transformers
from hf.prompts import batch, own
from support import tiny

import specdec.hf

GREEDY = {"do_sample": False, "max_new_tokens": 7}
IDS = torch.tensor([[5, 6, 7, 5, 6, 9], [8, 9, 3, 4, 5, 1]])


@pytest.fixture(scope="module")
def model():
    model = copy.deepcopy(tiny("llama"))
    with specdec.hf.enable(model, plain=True):
        yield model


def mask(*rows):
    return {"input_ids": IDS, "attention_mask": torch.tensor(rows)}


def cache():
    return transformers.DynamicCache(config=tiny("llama").config)


CALLS = {
    "padding at the left only": lambda: mask([1, 1, 1, 1, 1, 0], [1] * 6),
    "attention_mask": lambda: mask([0, 1, 0, 1, 1, 1], [1] * 6),
    "attention_mask: expected zeros and ones": lambda: mask([1, 1, 2, 2, 2, 2], [1] * 6),
    "position_ids": lambda: {"input_ids": IDS, "position_ids": torch.arange(2, 8)[None].repeat(2, 1)},
    "past_key_values=|cache=": lambda: {"input_ids": IDS, "past_key_values": cache()},
    "output_attentions=": lambda: {"input_ids": IDS, "output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states=": lambda: {"input_ids": IDS, "output_hidden_states": True, "return_dict_in_generate": True},
    "cache_implementation='static'": lambda: {"input_ids": IDS, "cache_implementation": "static"},
    "could reach 136 tokens, expected at most 128": lambda: {"input_ids": IDS, "max_new_tokens": 130},
}


@pytest.mark.parametrize("said", CALLS)
def test_a_plain_call_is_transformers_own(model, said):
    arguments = {**GREEDY, **CALLS[said]()}
    with pytest.warns(UserWarning, match=f"by transformers, not by specdec: .*({said})"):
        ours = model.generate(**arguments)
    theirs = tiny("llama").generate(**{**GREEDY, **CALLS[said]()})
    ours, theirs = (getattr(out, "sequences", out) for out in (ours, theirs))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("said", CALLS)
def test_an_assisted_batch_is_refused(model, said):
    with pytest.raises(ValueError, match=f"({said}).*a batch of one"):
        model.generate(**{**GREEDY, **CALLS[said]()}, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("ids", [IDS[:0], IDS.float()], ids=["no rows", "floats"])
def test_ids_that_are_none(model, ids):
    with pytest.raises(ValueError, match="input_ids: expected"):
        model.generate(ids, attention_mask=torch.ones(ids.shape, dtype=torch.long), custom_generate=specdec.hf.generate)


def test_inputs_that_something_else_prepares(model):
    """What prompt tuning of peft does: it puts tokens of its own in front of the call's."""
    twins = [model, copy.deepcopy(tiny("llama"))]
    outputs = []
    for twin in twins:

        def prepare(input_ids, twin=twin, **kwargs):
            return type(twin).prepare_inputs_for_generation(twin, (input_ids + 1) % 97, **kwargs)

        twin.prepare_inputs_for_generation = prepare
        try:
            outputs.append(twin.generate(IDS, **GREEDY))
            if twin is model:
                with pytest.raises(ValueError, match="prepare_inputs_for_generation: replaced"):
                    model.generate(IDS, **GREEDY, prompt_lookup_num_tokens=3)
        finally:
            del twin.prepare_inputs_for_generation
    assert torch.equal(*outputs)
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation  # put back, as peft does
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*by transformers.*")
        model.generate(IDS, **GREEDY)
    del model.prepare_inputs_for_generation


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_follow_the_length_of_the_text(kind):
    """Exact up to the positions where they begin to, also behind a longer forward of another kind; past them named."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 24}
    config = copy.deepcopy(tiny("llama").config)
    config.max_position_embeddings = 24 if kind == "dynamic" else 96
    config.rope_parameters = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        **(factors if kind == "longrope" else {}),
    }
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.load_state_dict(tiny("llama").state_dict())
    followed = copy.deepcopy(plain)
    with specdec.hf.enable(followed):
        followed(torch.arange(60)[None])
        out = followed.generate(**batch(), do_sample=False, max_new_tokens=5, prompt_lookup_num_tokens=4)
        assert torch.equal(out, plain.generate(**batch(), do_sample=False, max_new_tokens=5))
        with pytest.raises(ValueError, match="max_new_tokens=6: a row could reach 25 tokens, expected at most 24"):
            followed.generate(**batch(), do_sample=False, max_new_tokens=6, prompt_lookup_num_tokens=4)


def test_embeddings_instead_of_tokens(model):
    embeddings = model.get_input_embeddings()(IDS)
    with pytest.warns(UserWarning, match="inputs_embeds="):
        ours = model.generate(inputs_embeds=embeddings, **GREEDY)
    assert torch.equal(ours, tiny("llama").generate(inputs_embeds=embeddings, **GREEDY))


def test_under_autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(UserWarning, match="torch.autocast"):
            ours = model.generate(IDS, **GREEDY)
        assert torch.equal(ours, tiny("llama").generate(IDS, **GREEDY))
        with pytest.raises(ValueError, match="torch.autocast"):
            model.generate(IDS, **GREEDY, prompt_lookup_num_tokens=3)


def test_a_callers_cache_is_filled_by_transformers(model):
    kept = cache()
    with pytest.warns(UserWarning):
        model.generate(IDS, past_key_values=kept, **GREEDY)
    assert kept.get_seq_length() == 6 + 7 - 1


def test_an_enabled_model_as_somebodys_assistant_is_transformers_own(model):
    other, one = copy.deepcopy(tiny("llama", noise=0.01)), {"input_ids": IDS[:1]}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*by transformers.*")
        out = other.generate(**one, **GREEDY, assistant_model=model)
    assert torch.equal(out, other.generate(**one, **GREEDY))


def test_what_is_said_of_an_ordinary_call(model):
    """Values that ask for nothing are no obstacle."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*by transformers.*")
        positions = (batch()["attention_mask"].cumsum(1) - 1).clamp(min=0)
        for arguments in (
            {"output_scores": True},  # without return_dict_in_generate transformers keeps none either
            {"token_type_ids": None} if "token_type_ids" in vars(model.config) else {},
            {"position_ids": positions},
            {"use_cache": False},
            {"output_attentions": False},
        ):
            assert torch.equal(model.generate(**batch(), **GREEDY, **arguments), own(max_new_tokens=7))


@pytest.mark.parametrize("longest", [1, 2, 5])
def test_the_longest_match_of_a_look_up(model, longest):
    kwargs = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": longest}
    assert torch.equal(model.generate(**batch(), **GREEDY, **kwargs), own(max_new_tokens=7))


NUMBERS = (
    {"prompt_lookup_num_tokens": 0},
    {"prompt_lookup_num_tokens": 2.5},
    {"max_matching_ngram_size": -1, "prompt_lookup_num_tokens": 3},
    {"num_assistant_tokens": -1, "assistant_model": tiny("llama", seed=2)},
)


@pytest.mark.parametrize("arguments", NUMBERS, ids=lambda arguments: next(iter(arguments)))
def test_a_bad_number_of_drafts_is_named(model, arguments):
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(arguments))}: expected"):
        model.generate(**batch(), **GREEDY, **arguments)


def test_no_drafts_at_all():
    model, near = copy.deepcopy(tiny("llama")), copy.deepcopy(tiny("llama", noise=0.01))
    with specdec.hf.enable(model, k=3) as enabled:
        out = model.generate(**batch(), **GREEDY, assistant_model=near, num_assistant_tokens=0)
        assert torch.equal(out, own(max_new_tokens=7)) and not enabled.stats.drafted
