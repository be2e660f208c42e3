"""An audit as a user starts it: the built-in model, a model's own, transformers' generate; bad settings; the command."""

import json

import faults
import pytest
import torch
from support import tiny

from specdec.audit import distribution, equality, toys
from specdec.audit.laboratory import Settings, audit
from specdec.audit.subject import AssistedSubject, EngineSubject, Request
from specdec.cli import main
from specdec.llm import LLM

PROMPTS = [[5, 6, 7, 5, 6], [1, 2, 3] * 3]


def test_a_table_model_is_its_table():
    table = torch.randn(5, 5)
    with torch.inference_mode():
        logits = toys.table_model(table)(torch.tensor([[0, 3, 4, 2]])).logits[0]
    torch.testing.assert_close(logits, table[[0, 3, 4, 2]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("verifier", ["coupled", "block"])
def test_levels_two_to_four_of_an_engine(verifier):
    with LLM(toys.random_pair()[0], drafter="lookup", verifier=verifier, max_model_len=64) as llm:
        subject = EngineSubject(llm, PROMPTS, "a model", verifier)
        checks = equality.greedy(subject, 2, 10, None) + equality.seeds(subject, 2, 10, None)
        checks += distribution.outputs(subject, 4, 10, 1.0)
    assert {c.status for c in checks} <= {"pass", "skipped"}
    assert [c.level for c in checks] == [2, 2, *([3] * 3 if verifier == "coupled" else [3]), 4, 4]


def test_transformers_own_generate():
    subject = AssistedSubject(tiny(), tiny(noise=0.01), PROMPTS, "transformers")
    checks = equality.greedy(subject, 2, 6, None) + equality.seeds(subject, 2, 6, None)
    checks += distribution.outputs(subject, 3, 6, 1.0)
    assert [c.status for c in checks] == ["pass", "pass", "skipped", "pass", "pass"]
    assert 0 < equality.width_noise(subject.model, PROMPTS[1]) < 1e-3  # of fp32


def test_a_wrong_generate_is_found():
    """A subject that speaks with another model's voice as soon as it speculates."""

    class Wrong(AssistedSubject):
        def decode(self, requests, speculative):
            model, self.model = self.model, tiny(seed=4) if speculative else self.model
            try:
                return super().decode(requests, False)
            finally:
                self.model = model

    subject = Wrong(tiny(), None, PROMPTS, "wrong")
    checks = equality.greedy(subject, 2, 4, None) + distribution.outputs(subject, 12, 8, 1.0)
    assert [c.status for c in checks] == ["FAIL", "FAIL", "FAIL", "FAIL"]
    assert equality.greedy(subject, 1, 4, 1e6)[0].status == "pass"  # within a noise that large, anything is


def test_ranks_are_even_for_draws_of_the_model():
    """1,600 draws from a table, each in its own sixteenth: odds of a false alarm 1e-5, and the seeds are fixed."""
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    model, generator = toys.table_model(table), torch.Generator().manual_seed(2)
    values = []
    for seed in range(8):
        output = [0]
        for _ in range(200):
            output.append(int((table[output[-1]] / 0.7).softmax(0).multinomial(1, generator=generator)))
        values.append(distribution.ranks(model, Request([0], 0.7, seed, 200), output[1:]))
    assert distribution.uniform(torch.cat(values)) > 1e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(verifier="typical"), "verifier: expected coupled, rejection, block, got 'typical'"),
        (dict(levels=(0, 7)), "levels: expected some of 0 to 4, got 0, 7"),
        (dict(requests=0), "requests: expected at least 1, got 0"),
        (dict(k=0), "k: expected at least 1, got 0"),
        (dict(temperature=0.0), "temperature: expected more than 0"),
        (dict(endpoint="http://a/v1"), "expected both URLs"),
        (dict(endpoint="a", baseline="b", model="c"), "expected no MODEL"),
        (dict(transformers=True), "transformers: expected a MODEL"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_the_built_in_model_takes_no_drafter():
    with pytest.raises(ValueError, match="drafter, prompts: expected a MODEL"):
        audit(Settings(drafter="lookup"))


def run(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *arguments])
    return stopped.value.code, capsys.readouterr()


def test_the_command_prints_a_table_or_json(capsys):
    code, printed = run(["--levels", "2", "--tokens", "6"], capsys)
    assert code == 0
    assert "greedy, on against off" in printed.out and "no difference found" in printed.out
    code, printed = run(["--levels", "2", "--tokens", "6", "--json"], capsys)
    document = json.loads(printed.out)
    assert code == 0 and document["passed"] and [c["level"] for c in document["checks"]] == [2, 2, 2]


def test_the_command_exits_with_one_where_a_level_fails(capsys, monkeypatch):
    faults.accept_all_by_equality(monkeypatch)
    code, printed = run(["--levels", "2", "--tokens", "12", "--json"], capsys)
    assert code == 1 and json.loads(printed.out)["verdict"] == "NOT LOSSLESS: level 2 failed"


def test_bad_usage_is_one_line(capsys):
    code, printed = run(["--levels", "two"], capsys)
    assert code == 2 and printed.err.strip() == "specdec: error: levels: expected some of 0,1,2,3,4, got two"
