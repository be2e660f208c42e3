from dataclasses import replace

import pytest
from transformers import GenerationConfig

from specdec.sampling import SamplingParams, sample_seed


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("max_tokens", 0, ValueError),
        ("max_tokens", 1.5, TypeError),
        ("temperature", -0.1, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", float("inf"), ValueError),
        ("temperature", "hot", TypeError),
        ("top_k", -1, ValueError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.1, ValueError),
        ("min_p", 1.1, ValueError),
        ("n", 0, ValueError),
        ("n", True, TypeError),
        ("k", -1, ValueError),
        ("seed", 1 << 64, ValueError),
        ("stop", ("",), ValueError),
        ("stop_token_ids", (-1,), ValueError),
        ("stop_token_ids", None, TypeError),
        ("repetition_penalty", 0.0, ValueError),
        ("repetition_penalty", "1", TypeError),
        ("presence_penalty", float("nan"), ValueError),
        ("presence_penalty", None, TypeError),
        ("frequency_penalty", float("inf"), ValueError),
        ("logit_bias", [1, 2], TypeError),
        ("logit_bias", ((1, 2, 3),), TypeError),
        ("logit_bias", {1: float("inf")}, ValueError),
        ("logit_bias", {1: None}, TypeError),
        ("logit_bias", {-1: 1.0}, ValueError),
        ("logit_bias", {"a": 1.0}, TypeError),
        ("allowed_token_ids", (), ValueError),
        ("allowed_token_ids", 3, TypeError),
        ("allowed_token_ids", (1.5,), TypeError),
        ("bad_words", "damn", TypeError),
        ("bad_words", (3,), TypeError),
        ("bad_words", ("",), ValueError),
        ("bad_words", ([1] * 17,), ValueError),
        ("bad_words", ([-1],), ValueError),
        ("min_tokens", -1, ValueError),
        ("min_tokens", 257, ValueError),
        ("logprobs", 21, ValueError),
        ("logprobs", True, TypeError),
        ("prompt_logprobs", -1, ValueError),
        ("processed_logprobs", True, ValueError),
    ],
)
def test_bad_values_name_the_argument(argument, value, error):
    with pytest.raises(error, match=f"{argument}: expected .*, got "):
        SamplingParams(**{argument: value})


def test_switches_are_bools():
    for name in ("ignore_eos", "processed_logprobs"):
        with pytest.raises(TypeError, match=f"{name}: expected a bool, got int"):
            SamplingParams(logprobs=1, **{name: 1})


def test_parameters_cannot_change_and_can_be_copied():
    ids, bias = [1, 2], {3: 1.0}
    p = SamplingParams(stop=["a"], stop_token_ids=ids, allowed_token_ids=ids, bad_words=["x", ids], logit_bias=bias)
    ids.append(3)
    bias[4] = 1.0
    assert (p.stop_token_ids, p.allowed_token_ids, p.bad_words) == ((1, 2), (1, 2), ("x", (1, 2)))
    assert p.biased_tokens == ((3, 1.0),)
    assert replace(p, n=1) == p and len({p, replace(p)}) == 1


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words"])
def test_ids_that_the_model_does_not_have(name):
    p = SamplingParams(**{name: {"logit_bias": {9: 1.0}, "bad_words": ((9,),)}.get(name, (9,))})
    p.check_vocabulary(10)
    with pytest.raises(ValueError, match=f"{name}: expected token ids in 0..8, got 9"):
        p.check_vocabulary(9)


def test_defaults_come_from_the_generation_config():
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    p = SamplingParams().resolve(config)
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == (0.6, 20, 0.95, 0.0)
    assert SamplingParams(temperature=0.0, top_k=0).resolve(config).top_k == 0
    greedy = SamplingParams().resolve(GenerationConfig(do_sample=False, temperature=0.6, top_k=20))
    assert (greedy.temperature, greedy.top_k) == (0.0, 0)
    assert SamplingParams().resolve(None).temperature == 0.0


def test_what_a_generation_config_asks_for_beside_sampling():
    config = GenerationConfig(
        repetition_penalty=1.3, min_new_tokens=4, min_length=9, suppress_tokens=[5], bad_words_ids=[[1, 2], [7], [3]],
        eos_token_id=[7, 8], stop_strings=["END"],
    )  # fmt: skip
    p = SamplingParams().resolve(config, prompt_len=3)
    assert (p.repetition_penalty, p.min_tokens, p.stop) == (1.3, 6, ("END",))
    assert p.bad_words == ((1, 2), (3,), (5,))  # the end token alone is no bad word, as in transformers
    assert SamplingParams().resolve(config, prompt_len=7).min_tokens == 4
    assert SamplingParams(max_tokens=2).resolve(config).min_tokens == 2
    own = SamplingParams(repetition_penalty=1.0, min_tokens=0, bad_words=(), stop=()).resolve(config)
    assert not own.adjusted and own.stop == ()
    assert not SamplingParams().resolve(None).adjusted


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 4), ("no_repeat_ngram_size", 3), ("sequence_bias", [[[1, 2], 1.0]]), ("forced_eos_token_id", 3),
     ("guidance_scale", 1.5), ("begin_suppress_tokens", [3]), ("penalty_alpha", 0.6), ("max_time", 3.0),
     ("exponential_decay_length_penalty", (3, 1.1)), ("remove_invalid_values", True), ("encoder_repetition_penalty", 2.0)],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(name, value):
    config = GenerationConfig(**{name: value})
    with pytest.raises(ValueError, match=rf"generation_config.{name}: expected None.* got .*not supported"):
        SamplingParams().resolve(config)


def test_what_only_matters_to_a_config_that_samples():
    assert SamplingParams().resolve(GenerationConfig(typical_p=0.9)).temperature == 0.0
    with pytest.raises(ValueError, match=r"generation_config.typical_p: expected None or 1, got 0.9"):
        SamplingParams().resolve(GenerationConfig(do_sample=True, typical_p=0.9))
    assert SamplingParams().resolve(GenerationConfig(do_sample=True, typical_p=1.0, num_beams=1)).temperature == 1.0


def test_a_missing_seed_is_drawn_and_kept():
    seeds = {SamplingParams().resolve(None).seed for _ in range(8)}
    assert len(seeds) == 8  # a collision of 64-bit seeds: odds 28 / 2**64
    assert SamplingParams(seed=5).resolve(None, seed=9).seed == 5
    assert SamplingParams().resolve(None, seed=9).seed == 9


def test_sample_seeds_are_distinct_int64_and_the_first_is_the_requests():
    seeds = [sample_seed(7, i) for i in range(1000)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 1000
    assert all(-(1 << 63) <= s < 1 << 63 for s in seeds)
    assert sample_seed((1 << 64) - 1, 0) == -1


def test_what_costs_noise_and_filters():
    assert not SamplingParams(temperature=0.0, top_k=5).resolve(None).noise
    assert not SamplingParams(temperature=0.0, top_k=5).resolve(None).filters
    assert SamplingParams(temperature=1.0).resolve(None).noise
    assert SamplingParams(temperature=1.0, min_p=0.1).resolve(None).filters
