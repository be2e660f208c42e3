"""Where an output ends, at every place in a block of accepted tokens: all that people see of it is plain decoding's."""

import copy

import pytest
import torch
from support import VOCAB, Oracle, params, plain, tiny

from specdec import LLM, SamplingParams

PROMPT, NEW = [1, 2, 3], 18
SEEDS = (3, 4)
ALPHABET = "aé€👩 .".encode()


class Bytes:
    """A tokenizer whose tokens are bytes of a few characters of one to four bytes, often broken ones."""

    chat_template = None

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ALPHABET[i % len(ALPHABET)] for i in ids).decode("utf-8", errors="replace")


class Partly(Oracle):
    """Right but for every third position, so that a block ends where a draft is wrong."""

    def propose(self, rows, k):
        ids, counts = super().propose(rows, k)
        at = rows.lengths[:, None] + torch.arange(k)
        return torch.where(at % 3 == 0, (ids + 1) % VOCAB, ids), counts


def full(seed):
    return plain("llama", tuple(PROMPT), NEW, params(1.0, seed=seed))


def cases():
    """Requests that end at each of the first tokens in each way, and in several ways at once."""
    for seed in SEEDS:
        output = full(seed)[len(PROMPT) :]
        text = Bytes().decode(output)
        one = {"temperature": 1.0, "seed": seed, "logprobs": 1}
        for at in range(1, 11):
            token = output[at]
            yield dict(one, max_tokens=at)
            yield dict(one, max_tokens=NEW, stop_token_ids=(token,))
            yield dict(one, max_tokens=at + 1, stop_token_ids=(token,))  # both at once: it is a stop
            yield dict(one, max_tokens=NEW, stop_token_ids=(token,), min_tokens=at + 2)
            yield dict(one, max_tokens=NEW, stop_token_ids=(token, output[-at]), stop=(text[at : at + 2],))
            for length in (1, 3):
                yield dict(one, max_tokens=NEW, stop=(text[at : at + length],))
                yield dict(one, max_tokens=at + 2, stop=("zz", text[at : at + length]), min_tokens=2)


@pytest.fixture(scope="module")
def model():
    """It ends at the token that is its eighth for the first seed, where no request says otherwise."""
    model = copy.deepcopy(tiny("llama"))
    model.generation_config.eos_token_id = full(SEEDS[0])[len(PROMPT) + 7]
    return model


def seen(output, pieces):
    """All that people see of an output but the numbers that say how it was made."""
    shown = [p.logprobs for p in pieces]
    logprobs = [(entry.token_id, entry.top[0][0]) for entry in output.logprobs]
    return {
        "ids": output.token_ids,
        "text": output.text,
        "reason": output.finish_reason,
        "counted": output.stats.num_tokens,
        "logprobs": logprobs,
        "values": [entry.logprob for entry in output.logprobs],
        "streamed ids": [t for p in pieces for t in p.token_ids],
        "streamed text": "".join(p.text for p in pieces),
        "streamed logprobs": [(e.token_id, e.top[0][0]) for part in shown for e in part],
        "finished": [p.finished for p in pieces][-1:],
    }


def decode(llm, asked, **k):
    handles = [llm.submit(PROMPT, SamplingParams(**one, **k)) for one in asked]
    return [seen(handle.result(), pieces) for handle in handles for pieces in [list(handle)]]


@pytest.mark.parametrize(("drafter", "lag"), [(Oracle, 0), (Partly, 2)])
def test_every_end_at_every_place_of_a_block(model, drafter, lag):
    drafter = drafter()
    drafter.known += [(full(seed), seed) for seed in SEEDS]
    asked = list(cases())
    with LLM(model, tokenizer=Bytes(), drafter=drafter, k=7, max_rows=16, max_model_len=32, lag=lag) as llm:
        alone = decode(llm, asked, k=0)
        before = llm.stats.drafted
        drafted = decode(llm, asked)
        assert before == 0 and llm.stats.accepted > 500
    for one, want, got in zip(asked, alone, drafted, strict=True):
        assert got.pop("values") == pytest.approx(want.pop("values"), abs=1e-4)
        assert got == want, one
        assert got["streamed text"] == got["text"] and got["streamed ids"] == got["ids"]
        assert [t for t, _ in got["logprobs"]] == got["ids"] and got["counted"] == len(got["ids"])
        assert len(got["ids"]) >= one.get("min_tokens", 1) or one.get("stop")
    reasons = [one["reason"] for one in alone]
    assert 20 < reasons.count("stop") < len(reasons) - 20


@pytest.mark.parametrize("at", range(1, 12))
def test_ends_are_where_the_text_says(model, at):
    """The same without a second run to compare with: from the tokens that would have come."""
    output = full(SEEDS[1])[len(PROMPT) :]
    oracle = Oracle()
    oracle.known.append((full(SEEDS[1]), SEEDS[1]))
    first = output.index(output[at])
    with LLM(model, tokenizer=Bytes(), drafter=oracle, k=7, max_rows=1, max_model_len=32) as llm:
        asked = dict(temperature=1.0, seed=SEEDS[1], ignore_eos=True)
        cut = llm.generate(PROMPT, SamplingParams(**asked, max_tokens=at))[0]
        stopped = llm.generate(PROMPT, SamplingParams(**asked, max_tokens=NEW, stop_token_ids=(output[at],)))[0]
    assert (cut.token_ids, cut.finish_reason) == (output[:at], "length")
    assert (stopped.token_ids, stopped.finish_reason) == (output[: first + 1], "stop")
    assert stopped.text == Bytes().decode(output[: first + 1])
