"""Structured output: it follows its grammar, and is the same whoever drafts."""

import json
import re

import pytest
import torch
import transformers

from specdec import LLM, SamplingParams
from specdec.grammar import Grammars

VOCAB = 49152
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
ASKED = {
    "json_schema": SCHEMA,
    "regex": r"[0-9]{3}-(cat|dog)s?",
    "grammar": 'start: "yes" | "no" | "may" "be"?',
}


class Junk:
    """Drafts what no grammar here allows, then what it may: rejected drafts are everywhere."""

    def __init__(self, tokenizer):
        self.ids = torch.tensor(tokenizer('}{"name": 1', add_special_tokens=False)["input_ids"])

    def propose(self, rows, k):
        at = (rows.lengths[:, None] + torch.arange(k)) % len(self.ids)
        return self.ids[at], torch.full_like(rows.lengths, k)


@pytest.fixture(scope="module", params=["lookup", "junk"])
def llm(request, smollm2):
    """A random model with SmolLM2's tokenizer: it says nothing, but in the form that is asked for."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256, eos_token_id=2, bos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    drafter = Junk(smollm2.tokenizer) if request.param == "junk" else "lookup"
    with LLM(model, tokenizer=smollm2.tokenizer, drafter=drafter, k=4, max_rows=4, max_model_len=128) as llm:
        yield llm


def test_outputs_follow_and_do_not_depend_on_drafts(llm):
    asked = [SamplingParams(max_tokens=48, temperature=1.0, seed=2, **{name: text}) for name, text in ASKED.items()]
    prompts = ["A person as JSON:", "A code: 123-cats, 123-cats, 12", "Do you agree?"]
    outputs = llm.generate(prompts, asked)
    plain = [SamplingParams(max_tokens=48, temperature=1.0, seed=2, k=0, **{n: text}) for n, text in ASKED.items()]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(prompts, plain)]
    assert [o.finish_reason for o in outputs] == ["stop"] * 3
    person = json.loads(outputs[0].text)
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120
    assert re.fullmatch(ASKED["regex"], outputs[1].text)
    assert re.fullmatch("yes|no|may(be)?", outputs[2].text)
    assert sum(o.stats.drafted for o in outputs) > 0


def test_samples_share_a_grammar_and_keep_apart(llm):
    outputs = llm.generate("A code:", SamplingParams(max_tokens=12, temperature=1.0, seed=1, n=3, regex=ASKED["regex"]))
    assert all(re.fullmatch(ASKED["regex"], o.text) for o in outputs)
    assert len({o.text for o in outputs}) == 3


def test_what_is_no_grammar_is_refused(smollm2):
    grammars = Grammars(smollm2.tokenizer, VOCAB, (2,))
    for name, text in (("grammar", "start: %%%"), ("json_schema", "{not json"), ("regex", "(")):
        with pytest.raises(ValueError, match=f"{name}: expected one that llguidance understands, got "):
            grammars.processor(SamplingParams(**{name: text}), 1)
    with pytest.raises(ValueError, match=r"expected a fast tokenizer of transformers, got str"):
        Grammars("tokenizer", 9, ())


def test_a_matcher_goes_back_where_a_draft_was_rejected(smollm2):
    """Called with prefixes in any order, it gives what a fresh one gives."""
    grammars, tokenizer = Grammars(smollm2.tokenizer, VOCAB, (2,)), smollm2.tokenizer
    p = SamplingParams(regex=r"[0-9]+-[ab]+")
    one = grammars.processor(p, 2)
    scores = torch.zeros(1, VOCAB)
    texts = ["", "1", "12-", "12-ab", "1", "2-", "xx", "12-a", ""]
    for text in texts:
        ids = torch.tensor([[7, 8, *tokenizer(text, add_special_tokens=False)["input_ids"]]], dtype=torch.long)
        assert torch.equal(one(ids, scores), grammars.processor(p, 2)(ids, scores)), text
    ends = torch.tensor([[7, 8, *tokenizer("1-a", add_special_tokens=False)["input_ids"], 2]])
    assert (one(ends, scores)[0] > -torch.inf).nonzero().tolist() in ([[2]], [])
