"""`generate` of an enabled model gives what transformers' own gives, and the model object stays what it was."""

import copy
import threading
import warnings

import pytest
import torch
import transformers
from hf.prompts import an_end, batch, own
from scipy import stats
from support import VOCAB, Oracle, tiny
from transformers.generation import GenerateDecoderOnlyOutput

import specdec.hf
from specdec import LLM
from specdec.hf.plugin import enabled_of

GREEDY = {"do_sample": False, "max_new_tokens": 12}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
KINDS = ("plain", "lookup", "assistant", "drafter")


@pytest.fixture(autouse=True)
def no_silent_fallback():
    """A call that is left to transformers warns; none may be, unless a test expects it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*by transformers, not by specdec.*")
        yield


def assistance(kind: str, assistant=None) -> tuple[dict, dict]:
    """Arguments of `enable` and of `generate`."""
    return {
        "plain": ({"plain": True}, {}),
        "lookup": ({}, {"prompt_lookup_num_tokens": 4}),
        "assistant": ({"k": 3}, {"assistant_model": assistant}),
        "drafter": ({"drafter": "lookup", "k": 6}, {}),
    }[kind]


# -- the same tokens


@pytest.mark.parametrize(
    "name, kind",
    [("llama", kind) for kind in KINDS] + [(n, k) for n in ("qwen3", "gemma2", "gemma3", "gpt2") for k in KINDS[1:3]],
)
def test_greedy_is_transformers_own(name, kind):
    model, assistant = copy.deepcopy(tiny(name)), copy.deepcopy(tiny("llama", noise=0.01))
    settings, arguments = assistance(kind, assistant)
    with specdec.hf.enable(model, **settings) as enabled:
        assert torch.equal(model.generate(**batch(), **GREEDY, **arguments), own(name))
        assert enabled.stats.emitted == 4 * 12
        assert (enabled.stats.drafted > 0) == (kind != "plain")
    assert assistant.generate(**batch(), **GREEDY).shape == (4, 19 + 12)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_end_at_their_own_end_token(model, near, kind):
    ends = [an_end(row=0, at=4), an_end(row=2, at=9)]
    settings, arguments = assistance(kind, near)
    for kwargs in ({"eos_token_id": ends}, {"eos_token_id": ends[0], "pad_token_id": 96}, {"eos_token_id": ends[1]}):
        with specdec.hf.enable(model, **settings):
            assert torch.equal(model.generate(**batch(), **GREEDY, **arguments, **kwargs), own(**kwargs))


def test_lengths(model):
    one = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}
    with specdec.hf.enable(model, plain=True):
        for kwargs in ({"max_new_tokens": 1}, {"max_length": 31, "max_new_tokens": None}):
            assert torch.equal(model.generate(**batch(), do_sample=False, **kwargs), own(**kwargs))
        assert torch.equal(model.generate(**one, do_sample=False), tiny("llama").generate(**one, do_sample=False))
        assert torch.equal(model.generate(one["input_ids"], **GREEDY), own(inputs=one))


def test_several_samples_of_a_prompt(model, near):
    """Greedy ones transformers refuses for itself; with temperature near 0 the samples are the greedy text."""
    cold = {"do_sample": True, "max_new_tokens": 12, "temperature": 1e-4, "num_return_sequences": 3}
    with specdec.hf.enable(model):
        for arguments in ({"assistant_model": near}, {"prompt_lookup_num_tokens": 3}):
            assert torch.equal(model.generate(**batch(), **cold, **arguments), own().repeat_interleave(3, 0))
    with specdec.hf.enable(model, plain=True, block_size=4) as enabled:
        out = model.generate(**batch(), max_new_tokens=9, do_sample=True, num_return_sequences=3)
        assert len({tuple(row) for row in out.tolist()}) == 12
        assert enabled.stats.prompt_tokens < 7 + 19 + 12, "samples of a prompt share its KV"


def test_the_output_object(model, near):
    with specdec.hf.enable(model):
        out = model.generate(**batch(), **GREEDY, assistant_model=near, return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput) and out.scores is None
    assert torch.equal(out.sequences, own())


def test_the_generation_config_counts(model):
    config = transformers.GenerationConfig(max_new_tokens=12, eos_token_id=an_end(), pad_token_id=3)
    with specdec.hf.enable(model, plain=True):
        out = model.generate(**batch(), generation_config=config)
    assert torch.equal(out, tiny("llama").generate(**batch(), generation_config=config))


# -- sampling


def sample(model, arguments=(), seed=5, **kwargs):
    torch.manual_seed(seed)
    return model.generate(**batch(), do_sample=True, max_new_tokens=12, **dict(arguments), **kwargs)


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 0, "top_p": 0.8}, {"top_k": 9, "min_p": 0.1}])
def test_a_seed_gives_the_same_samples_with_every_drafter(model, near, filters):
    drawn = []
    for kind in KINDS:
        settings, arguments = assistance(kind, near)
        with specdec.hf.enable(model, **settings):
            drawn.append(sample(model, arguments, **filters))
    with specdec.hf.enable(model, plain=True):
        drawn.append(sample(model, **filters))
        assert not torch.equal(sample(model, seed=6, **filters), drawn[0])
    assert all(torch.equal(out, drawn[0]) for out in drawn)


def test_only_sampling_moves_the_global_generator(model):
    with specdec.hf.enable(model, plain=True):
        before = torch.manual_seed(1).get_state()
        model.generate(**batch(), **GREEDY)
        assert torch.equal(torch.get_rng_state(), before)
        model.generate(**batch(), do_sample=True, max_new_tokens=1)
        assert not torch.equal(torch.get_rng_state(), before)


def test_the_first_token_follows_the_filtered_distribution(model):
    """Chi-squared at 1e-6: one false alarm in a million seeds, and the seed is fixed."""
    ids, count = torch.tensor([[5, 6, 7, 8]]), 600
    filters = {"temperature": 1.3, "top_k": 12, "top_p": 0.95}
    torch.manual_seed(0)
    with specdec.hf.enable(model, plain=True):
        out = model.generate(ids, do_sample=True, max_new_tokens=1, num_return_sequences=count, **filters)
    reference = tiny("llama").generate(
        ids, do_sample=True, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **filters
    )
    p = reference.scores[0][0].softmax(-1).double()
    seen = torch.bincount(out[:, -1], minlength=VOCAB)
    assert seen[p == 0].sum() == 0
    assert stats.chisquare(seen[p > 0].numpy(), (p[p > 0] / p.sum() * count).numpy()).pvalue > 1e-6


def test_sampling_keeps_transformers_default_of_fifty_tokens(model):
    ids = torch.tensor([[5, 6, 7, 8]])
    kept = tiny("llama")(ids).logits[0, -1].topk(50).indices.tolist()
    with specdec.hf.enable(model, plain=True):
        out = model.generate(ids, do_sample=True, max_new_tokens=1, num_return_sequences=200, temperature=50.0)
    assert set(out[:, -1].tolist()) <= set(kept)


# -- what has no paged form


def test_other_modes_stay_transformers_own(model, near):
    with specdec.hf.enable(model, plain=True):
        assert torch.equal(model.generate(**batch(), **GREEDY, num_beams=3), own(num_beams=3))


KEPT = {"output_hidden_states": True, "return_dict_in_generate": True}


def test_plain_calls_without_a_paged_form_are_transformers_own(model):
    with specdec.hf.enable(model, plain=True):
        with pytest.warns(UserWarning, match="output_hidden_states=True"):
            out = model.generate(**batch(), **GREEDY, **KEPT)
        assert len(out.hidden_states) == 12 and torch.equal(out.sequences, own())


def test_an_assisted_batch_without_a_paged_form_is_refused_by_name(model, near):
    with specdec.hf.enable(model):
        with pytest.raises(ValueError, match="output_hidden_states=True"):
            model.generate(**batch(), **GREEDY, **KEPT, assistant_model=near)
        with pytest.raises(ValueError, match="cache_implementation='static'"):
            model.generate(**batch(), **GREEDY, prompt_lookup_num_tokens=3, cache_implementation="static")


def test_an_assisted_single_row_without_a_paged_form_is_transformers_own(model, near):
    one = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}
    with specdec.hf.enable(model):
        with pytest.warns(UserWarning, match="output_hidden_states=True"):
            out = model.generate(**one, **GREEDY, **KEPT, assistant_model=near)
        assert len(out.hidden_states) == 12 and torch.equal(out.sequences, own(inputs=one))
        with pytest.warns(UserWarning, match="another model object"):
            model.generate(**one, **GREEDY, assistant_model=model)


def test_an_assistant_whose_vocabulary_is_padded_further(model):
    config = copy.deepcopy(tiny("llama").config)
    config.vocab_size = VOCAB + 7
    other, one = transformers.LlamaForCausalLM(config).eval(), {"input_ids": torch.tensor([[5, 6, 7]])}
    with specdec.hf.enable(model) as enabled:
        assert torch.equal(model.generate(**batch(), **GREEDY, assistant_model=other), own())
        assert enabled.stats.drafted
        with pytest.raises(
            ValueError, match="different tokenizers"
        ):  # where it is left to transformers, its rules hold
            with pytest.warns(UserWarning, match="output_hidden_states"):
                model.generate(**one, **GREEDY, **KEPT, assistant_model=other)


def test_an_assistant_of_another_vocabulary_is_refused(model):
    config = copy.deepcopy(tiny("llama").config)
    config.vocab_size = 4096
    other = transformers.LlamaForCausalLM(config)
    with specdec.hf.enable(model), pytest.raises(ValueError, match="tokenizer"):
        model.generate(**batch(), **GREEDY, assistant_model=other)


def short_gpt2():
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **sizes)).eval()


def mamba():
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=VOCAB, **sizes)).eval()


def wrapped(model):
    """Not a transformers model, but with the config of one, as peft's are."""
    other = torch.nn.Linear(2, 2)
    other.config = model.config
    return other


def with_layers_of(model):
    """What cutting layers off a shallow copy gives."""
    other = copy.deepcopy(tiny("llama", noise=0.01))
    other.model.layers[0] = model.model.layers[0]
    return other


ASSISTANTS = {
    "assistant_model: expected a transformers model, got Linear": wrapped,
    "assistant_model: .* keep other state than KV": lambda model: mamba(),
    "assistant_model: it shares layers": with_layers_of,
    "could reach 31 tokens, expected at most 24": lambda model: short_gpt2(),
}


@pytest.mark.parametrize("said", ASSISTANTS)
def test_an_assistant_that_cannot_be_paged_is_refused_by_name(model, said):
    with specdec.hf.enable(model), pytest.raises(ValueError, match=f"{said}.*a batch of one"):
        model.generate(**batch(), **GREEDY, assistant_model=ASSISTANTS[said](model))
    assert torch.equal(model.generate(**batch(), **GREEDY), own())


def test_a_single_row_is_left_to_transformers_with_such_an_assistant(model):
    one = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}
    with specdec.hf.enable(model), pytest.warns(UserWarning, match="assistant_model: it shares layers"):
        assert torch.equal(model.generate(**one, **GREEDY, assistant_model=with_layers_of(model)), own(inputs=one))


def test_learned_positions_of_an_assistant_count(model):
    short = short_gpt2()
    with specdec.hf.enable(model, plain=True) as enabled:
        calls = {"do_sample": False, "max_new_tokens": 5}
        assert torch.equal(model.generate(**batch(), **calls, assistant_model=short), own(max_new_tokens=5))
        assert enabled.stats.drafted
        assert torch.equal(model.generate(**batch(), **GREEDY), own()), "without it there is no such limit"


def test_assisted_calls_of_models_that_are_not_enabled_stay_as_they_were(near):
    other = tiny("llama", seed=3)
    with pytest.raises(ValueError, match="batch_size = 1"):
        other.generate(**batch(), **GREEDY, assistant_model=near)


# -- the model object


def test_the_class_comes_back_and_nothing_is_left(model, near):
    before, names = type(model), [set(vars(m)) for m in model.modules()]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    enabled = specdec.hf.enable(model)
    assert isinstance(model, before) and type(model).__name__ == before.__name__
    assert type(model).__module__ == before.__module__
    model.generate(**batch(), **GREEDY, assistant_model=near)
    assert specdec.hf.enable(model, plain=True) is not enabled
    model.generate(**batch(), **GREEDY)
    specdec.hf.disable(model)
    specdec.hf.disable(model)
    assert type(model) is before and [set(vars(m)) for m in model.modules()] == names
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert torch.equal(model.generate(**batch(), **GREEDY), own())
    with LLM(model) as llm:
        assert llm.limits.max_rows


def test_forwards_and_saving_are_as_before(model, tmp_path):
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with specdec.hf.enable(model, plain=True), torch.no_grad():
        model.generate(**batch(), **GREEDY)
        assert torch.equal(model(ids).logits, tiny("llama")(ids).logits)
        model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(loaded(ids).logits, tiny("llama")(ids).logits)


def test_copies_are_ordinary_models(model):
    with specdec.hf.enable(model, plain=True):
        model.generate(**batch(), **GREEDY)
        twin = copy.deepcopy(model)
        assert enabled_of(twin) is None and type(twin) is type(tiny("llama"))
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(model.generate(**batch(), **GREEDY), own())


def test_one_assistant_for_two_models_and_an_enabled_assistant(near):
    one, two = copy.deepcopy(tiny("llama")), copy.deepcopy(tiny("llama"))
    with specdec.hf.enable(one), specdec.hf.enable(two), specdec.hf.enable(near, plain=True):
        for model in (one, two, one):
            near.generate(**batch(), **GREEDY)
            assert torch.equal(model.generate(**batch(), **GREEDY, assistant_model=near), own())


def test_threads_take_turns(model):
    results = {}
    with specdec.hf.enable(model, plain=True):

        def work(i):
            results[i] = model.generate(**batch(seed=i), **GREEDY)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(results[i], own(inputs=batch(seed=i))) for i in range(4))


def test_bad_settings(model):
    with pytest.raises(TypeError, match="model: expected a transformers model, got Linear"):
        specdec.hf.enable(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected options among"):
        specdec.hf.enable(model, max_modl_len=3)
    with pytest.raises(ValueError, match="max_rows: expected at least 1"):
        specdec.hf.enable(model, max_rows=0)
    with pytest.raises(TypeError, match="drafter: expected"):
        specdec.hf.enable(model, drafter=3)
    with pytest.raises(ValueError, match="k: expected at least 0"):
        specdec.hf.enable(model, k=-1)
    mamba = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        specdec.hf.enable(transformers.MambaForCausalLM(mamba))
    with pytest.raises(ValueError, match="got lm_head.weight on the meta device"):
        half = copy.deepcopy(tiny("llama"))
        half.lm_head.to("meta")
        specdec.hf.enable(half)
    with pytest.raises(ValueError, match="decoder-only"):
        specdec.hf.enable(transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)))
    assert enabled_of(model) is None


def test_a_class_that_something_else_changed(model):
    enabled = specdec.hf.enable(model)
    model.__class__ = type("Wrapped", (type(model),), {})
    with pytest.raises(RuntimeError, match="its class became Wrapped"):
        specdec.hf.disable(model)
    model.__class__ = enabled.paged_class
    specdec.hf.disable(model)


# -- a drafter of one's own, and the call's own numbers


def test_a_drafter_object(model):
    oracle = Oracle()
    with specdec.hf.enable(model, drafter=oracle, k=5) as enabled:
        want = own()
        inputs = batch()
        rows = zip(want.tolist(), inputs["attention_mask"].sum(1).tolist(), strict=True)
        oracle.known = [(row[19 - n :], 0) for row, n in rows]
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
        assert enabled.stats.acceptance_length > 4


@pytest.mark.parametrize("arguments, k", [({}, 2), ({"num_assistant_tokens": 5}, 5)])
def test_the_calls_number_of_drafts_goes_before_the_settings(model, arguments, k):
    twin = copy.deepcopy(tiny("llama"))
    with specdec.hf.enable(model, k=2) as enabled:
        model.generate(**batch(), do_sample=False, max_new_tokens=1 + 3 * (k + 1), assistant_model=twin, **arguments)
        assert max(enabled.stats.accepted_per_round) == k


# -- real weights


def test_smollm2(smollm2):
    model, tokenizer = copy.deepcopy(smollm2.model), smollm2.tokenizer
    texts = ["Repeat after me: one two three, one two three, one two three, one two", "The capital of France is"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    arguments = {"max_new_tokens": 8, "do_sample": False, "stop_strings": ["Paris"], "tokenizer": tokenizer}
    want = smollm2.model.generate(**inputs, **arguments)
    with specdec.hf.enable(model) as enabled:
        assert torch.equal(model.generate(**inputs, **arguments, prompt_lookup_num_tokens=8), want)
        assert enabled.stats.acceptance_length > 1.2
