"""Wrong use: threads that get in each other's way, drafters and tokenizers that misbehave, leaving in the middle."""

import copy
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from support import VOCAB, params, plain, said_by_us, tiny

from specdec import LLM, SamplingParams
from specdec.draft import Draft

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture
def model():
    return copy.deepcopy(tiny("llama"))


def want(prompt, name="llama"):
    """The 12 tokens that plain decoding adds."""
    return plain(name, tuple(prompt), 12, params())[len(prompt) :]


class Tokenizer:
    """Decodes an id as a letter; raises for id `broken`."""

    chat_template = None

    def __init__(self, broken):
        self.broken = broken

    def decode(self, ids, skip_special_tokens=True):
        if self.broken in ids:
            raise KeyError(self.broken)
        return "".join(chr(33 + i) for i in ids)

    def __call__(self, text, **kwargs):
        raise LookupError(text)


def test_a_tokenizer_that_cannot_decode_fails_its_request_alone(model):
    bad = want([1, 2, 3])[0]
    good = next([p] for p in range(4, VOCAB) if bad not in want([p]))
    with LLM(model, tokenizer=Tokenizer(bad)) as llm:
        outputs = llm.generate([[1, 2, 3], good, "text"], GREEDY)
        assert isinstance(outputs[0].error, KeyError)
        assert isinstance(outputs[2].error, LookupError)
        assert outputs[1].token_ids == want(good)
        assert llm.generate(good, GREEDY)[0].token_ids == want(good)
        assert not llm._handles, "requests that have ended are kept"


def test_requests_that_wait_while_a_step_fails_end_too(model):
    """What stops the engine itself ends every request, also those that had not reached it yet."""
    inside, queued = threading.Event(), threading.Event()

    class Fatal:
        def propose(self, rows, k):
            inside.set()
            queued.wait(30)
            raise SystemExit("out")

    with LLM(model, drafter=Fatal(), k=2) as llm:
        first = llm.submit([1, 2, 3], GREEDY)
        assert inside.wait(30)
        second = llm.submit([4, 5, 6], GREEDY)
        queued.set()
        for handle in (first, second):
            with pytest.raises(SystemExit):
                handle.result()
        with pytest.raises(RuntimeError, match="the engine stopped after an error"):
            llm.generate([7], GREEDY)
        assert not llm._handles


@pytest.mark.parametrize(
    "bad",
    [
        {"top_k": 2**31},
        {"k": 2**20},
        {"stop_token_ids": (2**63,)},
        {"temperature": 1e300},
        {"temperature": 10**400},
        {"stop": b"a"},
        {"stop": 3},
        {"stop_token_ids": 5},
        {"stop_token_ids": "ab"},
    ],
)
def test_parameters_that_no_tensor_holds_are_named(bad):
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(bad))}: expected"):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_budget": 0},
        {"prompt_budget": 2.5},
        {"lag": -1},
        {"lag": True},
        {"seed": "abc"},
        {"seed": 2**80},
        {"k": 2**70},
    ],
)
def test_options_are_checked_before_anything_is_loaded(bad):
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(bad))}: expected"):
        LLM("/no/such/model", **bad)


def test_two_llms_in_two_threads_take_turns(model):
    other = copy.deepcopy(tiny("qwen3"))
    found = {}

    def ask(name, llm):
        found[name] = [llm.generate([i + 1, 2, 3], GREEDY)[0].token_ids for i in range(6)]

    with LLM(model) as a, LLM(other) as b:
        threads = [threading.Thread(target=ask, args=pair) for pair in (("llama", a), ("qwen3", b))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for name, got in found.items():
        assert got == [want([i + 1, 2, 3], name) for i in range(6)], name
    assert set(found) == {"llama", "qwen3"}


def test_ones_own_forward_beside_decoding(model):
    """Neither disturbs the other: they take turns."""
    ids = torch.tensor([[5, 6, 7, 8]])
    logits = model(ids).logits
    done = threading.Event()
    wrong = []

    def forwards():
        while not done.is_set():
            with torch.no_grad():
                got = model(ids).logits
            if not torch.allclose(got, logits, atol=1e-5):
                wrong.append(got)

    thread = threading.Thread(target=forwards)
    with LLM(model, drafter="lookup") as llm:
        thread.start()
        outputs = [llm.generate([i + 1, 2, 3], GREEDY)[0] for i in range(8)]
        done.set()
        thread.join()
    assert [o.token_ids for o in outputs] == [want([i + 1, 2, 3]) for i in range(8)]
    assert wrong == []


class Scribbler:
    """Writes over what it was given, each time another tensor, after drafting something."""

    def propose(self, rows, k):
        drafts = torch.randint(0, VOCAB, (len(rows.lengths), k))
        for tensor in (rows.seeds, rows.lengths, rows.want, rows.view.index, rows.view.block_table, rows.view.limit):
            tensor.add_(1)
        rows.sampling.temperature.add_(1)
        rows.view.all_tokens.zero_()
        rows.running.logical_not_()
        return drafts, torch.full_like(rows.lengths, k)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_writes_over_its_input_changes_nothing(model, temperature):
    p = SamplingParams(max_tokens=12, temperature=temperature, seed=5)
    with LLM(model) as llm:
        expected = [o.token_ids for o in llm.generate([[1, 2, 3], [7]], p)]
    with LLM(model, drafter=Scribbler(), k=3) as llm:
        assert [o.token_ids for o in llm.generate([[1, 2, 3], [7]], p)] == expected
        assert llm.engine.drafter_error is None


def meta(rows, k):
    return torch.zeros(len(rows.lengths), k, device="meta"), rows.want


def sparse(rows, k):
    return torch.zeros(len(rows.lengths), k).long().to_sparse(), rows.want


def written(rows, k):
    return Draft(torch.zeros(len(rows.lengths), k).long(), rows.want, written=torch.zeros(99).long())


def text(rows, k):
    return Draft(torch.zeros(len(rows.lengths), k).long(), rows.want, written="all")


@pytest.mark.parametrize("propose", [meta, sparse, written, text])
def test_a_draft_that_is_none_sets_the_drafter_aside(model, propose):
    drafter = type("Garbage", (), {"propose": lambda self, rows, k: propose(rows, k)})()
    with LLM(model, drafter=drafter, k=3) as llm, pytest.warns(UserWarning, match="the drafter failed"):
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == want([1, 2, 3])


def test_the_warning_names_the_line_that_failed(model):
    class Typo:
        def propose(self, rows, k):
            return rows.tokens

    with LLM(model, drafter=Typo(), k=3) as llm, pytest.warns(UserWarning, match=r"in propose, .*test_misuse.py:\d+"):
        llm.generate([1, 2, 3], GREEDY)


def test_waiting_for_an_llm_inside_its_own_round_is_refused(model):
    class Recursive:
        def propose(self, rows, k):
            return self.llm.generate([1, 2], GREEDY)

    drafter = Recursive()
    with LLM(model, drafter=drafter, k=2) as llm, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drafter.llm = llm
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == want([1, 2, 3])
    assert any("from inside a round of the same LLM" in str(w.message) for w in caught)


def test_leaving_python_in_the_middle_ends_the_process_well():
    """No close, one request decoding, one stream half read: exit status 0 and nothing on standard error."""
    program = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from support import tiny
from specdec import LLM, SamplingParams
llm = LLM(tiny("llama"))
llm.submit([1, 2, 3], SamplingParams(max_tokens=100, temperature=0.0))
stream = llm.stream([4, 5], SamplingParams(max_tokens=100, temperature=0.0))
next(stream)
"""

    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", program.format(tests=str(tests), root=str(tests.parent))],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, said_by_us(done.stderr)) == (0, "")


def replaced_data(model, weights):
    for parameter, weight in zip(model.parameters(), weights.values(), strict=True):
        parameter.data = weight.clone()


def assigned(model, weights):
    model.load_state_dict(weights, assign=True)


def copied(model, weights):
    model.load_state_dict(weights)


@pytest.mark.parametrize("change", [replaced_data, assigned, copied])
def test_changed_weights_are_taken_in_with_the_reset(model, change):
    other = copy.deepcopy(tiny("llama", seed=1))
    with LLM(model, drafter=copy.deepcopy(model), k=2) as llm:
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == want([1, 2, 3])
        change(model, copy.deepcopy(dict(other.named_parameters()) if change is replaced_data else other.state_dict()))
        llm.reset_prefix_cache()
        ids = torch.tensor([[1, 2, 3]])
        expected = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == expected[0, 3:].tolist()
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_weights_of_another_dtype_take_a_new_llm(model):
    with LLM(model) as llm:
        model.double()
        with pytest.raises(ValueError, match="model: expected weights of torch.float32 on cpu"):
            llm.reset_prefix_cache()


def test_a_deep_copy_of_a_model_in_use_serves_another_llm(model):
    with LLM(model) as llm:
        other = copy.deepcopy(model)
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == want([1, 2, 3])
        with LLM(other, drafter="lookup") as second:
            assert second.generate([1, 2, 3], GREEDY)[0].token_ids == want([1, 2, 3])
            assert llm.generate([4], GREEDY)[0].token_ids == want([4])
