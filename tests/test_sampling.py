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
    ],
)
def test_bad_values_name_the_argument(argument, value, error):
    with pytest.raises(error, match=f"{argument}: expected .*, got "):
        SamplingParams(**{argument: value})


def test_defaults_come_from_the_generation_config():
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    p = SamplingParams().resolve(config)
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == (0.6, 20, 0.95, 0.0)
    assert SamplingParams(temperature=0.0, top_k=0).resolve(config).top_k == 0
    greedy = SamplingParams().resolve(GenerationConfig(do_sample=False, temperature=0.6, top_k=20))
    assert (greedy.temperature, greedy.top_k) == (0.0, 0)
    assert SamplingParams().resolve(None).temperature == 0.0


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
