"""What a benchmark refuses before anything is loaded."""

from pathlib import Path

import pytest

from specdec import verify
from specdec.bench.settings import VERIFIERS, Settings, depths, names, numbers, reals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(methods=("plain", "magic")), "methods: expected some of plain, lookup, draft, got 'magic'"),
        (dict(methods=("draft",)), "methods: draft needs --drafter"),
        (dict(drafter="d"), "drafter: it is not used"),
        (dict(batch=(1, 0)), "batch: expected at least 1, got 0"),
        (dict(verifier="greedy"), "verifier: expected one of coupled, rejection, block, got 'greedy'"),
        (dict(verifier="block", acceptance_length=2.0), "verifier: --synthetic-acceptance overrules it"),
        (dict(dtype="int8"), "dtype: expected one of auto, float32, bfloat16, float16, got 'int8'"),
        (dict(kv_scales=Path("s.json")), "kv-scales: they are those of KV in fp8; give --kv-dtype fp8"),
        (dict(batch=(10**11,)), "batch: expected at most 4096, got 100000000000"),
        (dict(k=(0,)), "k: expected at least 1"),
        (dict(k=(2000,)), "k: expected at most 1024, got 2000"),
        (dict(prompt_budget=0), "prompt-budget: expected at least 1, got 0"),
        (dict(limit=10**9), "limit: expected at most 131072"),
        (dict(methods=("",)), "methods: expected some of plain, lookup, draft, got ''"),
        (dict(output_len=1), "output-len: expected at least 2"),
        (dict(runs=0), "runs: expected at least 1"),
        (dict(limit=0), "limit: expected at least 1"),
        (dict(temperatures=(-1.0,)), "temperature: expected at least 0"),
        (dict(temperatures=(float("nan"),)), "temperature: expected at least 0"),
        (dict(temperatures=(0.0, 1e300)), "temperature: expected at least 0 and at most 1e.30, got 1e.300"),
        (dict(acceptance_length=2.0, against=True, k=(4,)), "against: transformers' acceptance cannot be controlled"),
        (dict(input_lens=(0,)), "input-len, context: expected at least 1"),
        (dict(latency_target_ms=0.0), "latency-target: expected milliseconds above 0, got 0"),
        (dict(latency_target_ms=float("nan")), "latency-target: expected milliseconds above 0, got nan"),
        (dict(prompts=Path("p"), input_lens=(8,)), "prompts: random tokens"),
        (dict(random_weights=True), "random-weights: such a model has no tokenizer"),
        (dict(acceptance_length=0.5), "synthetic-acceptance: expected 1 to 5"),
        (dict(acceptance_length=6.0, k=(2, 4)), r"synthetic-acceptance: expected 1 to 5 \(k \+ 1"),
        (
            dict(acceptance_length=2.0, against=True, random_weights=True, input_lens=(8,), k=(4,)),
            "against: transformers' acceptance cannot be controlled",
        ),
    ],
)
def test_bad_settings(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings("model", **changes)


def test_numbers_depths_reals_and_names() -> None:
    assert names("plain, lookup,plain") == ("plain", "lookup") and names("") == ("",)
    assert numbers("batch", "1, 4,16,4") == (1, 4, 16) and numbers("context", "1k,8K") == (1024, 8192)
    assert depths("auto,2, 8") == ("auto", 2, 8) and reals("temperature", "0,0.7") == (0.0, 0.7)
    for call, message in [
        (lambda: numbers("batch", "1,x"), "batch: expected numbers such as 1,4,16 or 1k,8k, got '1,x'"),
        (lambda: numbers("batch", ""), "batch: expected numbers"),
        (lambda: numbers("batch", "k"), "batch: expected numbers"),
        (lambda: depths("1,-2"), "k: expected auto or numbers"),
        (lambda: reals("temperature", "warm"), "temperature: expected numbers such as 0,1, got 'warm'"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_verifiers_are_those_that_there_are() -> None:
    assert VERIFIERS == tuple(verify.VERIFIERS)


def test_label_says_that_acceptance_is_forced() -> None:
    assert Settings("m").label is None
    assert Settings("m", acceptance_length=3.4, k=(4,)).label == "controlled acceptance 3.4"
