"""The public face: on SmolLM2 where text matters, on a tiny model of token ids elsewhere."""

import asyncio
import copy
import gc
import importlib.util
import pathlib
import threading

import pytest
import scipy.stats
import torch
import transformers
from support import VOCAB, Letters, Oracle, params, plain, tiny

from specdec import LLM, SamplingParams, generate

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
TEXTS = (
    "Repeat after me: one two three, one two three, one two three, one two",
    "The capital of France is",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
)
EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "own_drafter.py"


@pytest.fixture(scope="module")
def model():
    return copy.deepcopy(tiny("llama"))


def test_what_a_request_may_not_ask_for(model):
    """Refused at once, by name; what needs a tokenizer says so."""
    with LLM(model, max_rows=1, max_model_len=32) as llm:
        for asked, message in (
            ({"bad_words": ("ab",)}, "bad_words: strings need a tokenizer"),
            ({"stop": "a"}, "stop: stop strings need a tokenizer"),
            ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: expected token ids in 0..96, got 97"),
            ({"allowed_token_ids": (500,)}, "allowed_token_ids: expected token ids in 0..96, got 500"),
            ({"stop_token_ids": (VOCAB,)}, "stop_token_ids: expected token ids in 0..96, got 97"),
            (
                {"bad_words": [[1, i % VOCAB, i // VOCAB] for i in range(257)]},
                "bad_words, min_tokens: expected at most 256",
            ),
            ({"regex": "a+"}, "regex, grammar: expected a fast tokenizer of transformers, got NoneType"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.generate([1, 2], SamplingParams(max_tokens=2, **asked))
        model.generation_config.num_beams = 3
        try:
            with pytest.raises(ValueError, match="generation_config.num_beams: expected None or 1, got 3"):
                llm.generate([1, 2])
        finally:
            model.generation_config.num_beams = None
        assert "specdec_emitted_tokens_total 0\n" in llm.metrics()


def test_smollm2_adjusted_gives_transformers_tokens(smol, smollm2):
    """Penalty, bad words, suppressed tokens and a shortest length together, greedy, with look-up drafts."""
    ids = smollm2.tokenizer(TEXTS[0])["input_ids"]
    bad, inputs = [[ids[-1], ids[-2]], [ids[-3]]], torch.tensor([ids])
    want = smollm2.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=10, do_sample=False, repetition_penalty=1.05,
        bad_words_ids=bad, suppress_tokens=[28], min_new_tokens=8,
    )[0, len(ids) :].tolist()  # fmt: skip
    asked = {"max_tokens": 10, "temperature": 0.0, "repetition_penalty": 1.05, "bad_words": [*bad, [28]]}
    assert smol.generate(ids, SamplingParams(**asked, min_tokens=8))[0].token_ids == want


def test_a_bad_word_is_not_written(smol):
    """As a string: the word itself, and with a space before it."""
    prompt, asked = "The capital of France is", {"max_tokens": 6, "temperature": 0.0}
    said, avoided = (smol.generate(prompt, SamplingParams(**asked, bad_words=w))[0].text for w in ((), ("Paris",)))
    assert "Paris" in said and "Paris" not in avoided


def plain_of(loaded, ids, new):
    inputs = torch.tensor([ids])
    out = loaded.model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def smol(smollm2):
    model = copy.deepcopy(smollm2.model)
    with LLM(model, tokenizer=smollm2.tokenizer, drafter="lookup", k=10, max_model_len=512, max_rows=4) as llm:
        yield llm


def test_smollm2_gives_transformers_tokens(smol, smollm2):
    outputs = smol.generate(list(TEXTS), GREEDY)
    for text, output in zip(TEXTS, outputs, strict=True):
        ids = smollm2.tokenizer(text)["input_ids"]
        assert output.prompt_token_ids == ids
        assert output.token_ids == plain_of(smollm2, ids, 24)[: len(output.token_ids)]
        assert output.finish_reason == ("length" if len(output.token_ids) == 24 else "stop")
        assert output.text == smollm2.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert outputs[0].stats.acceptance_length > 1.5


def test_smollm2_drafting_for_itself_is_always_right(smollm2):
    """A draft model on real weights: at temperature 1 with a seed, too, it draws what the target draws."""
    target, draft = copy.deepcopy(smollm2.model), copy.deepcopy(smollm2.model)
    with LLM(target, tokenizer=smollm2.tokenizer, drafter=draft, k=3, max_model_len=256, max_rows=2) as llm:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
        drafted = llm.generate(TEXTS[1], params)[0]
        alone = llm.generate(TEXTS[1], SamplingParams(max_tokens=12, temperature=1.0, seed=3, k=0))[0]
        assert drafted.token_ids == alone.token_ids
        assert drafted.stats.acceptance_rate > 0.9  # near ties may round apart between the widths


def test_streamed_pieces_are_the_text(smol):
    pieces = list(smol.stream(TEXTS[0], GREEDY))
    output = smol.generate(TEXTS[0], GREEDY)[0]
    assert "".join(p.text for p in pieces) == output.text
    assert [t for p in pieces for t in p.token_ids] == output.token_ids
    assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]


def test_stop_strings_cut_inside_accepted_tokens(smol):
    """Look-up accepts several tokens a round here; the cut is where plain decoding makes it."""
    text = smol.generate(TEXTS[0], SamplingParams(max_tokens=40, temperature=0.0, k=0))[0].text
    for stop in (text[9:12], text[20:27], text[33:35], text[60:62]):
        drafted = smol.generate(TEXTS[0], SamplingParams(max_tokens=40, temperature=0.0, stop=stop))[0]
        plain = smol.generate(TEXTS[0], SamplingParams(max_tokens=40, temperature=0.0, stop=stop, k=0))[0]
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        assert drafted.finish_reason == plain.finish_reason == "stop"
        assert stop not in drafted.text


def test_chat_uses_the_template(smol, smollm2):
    messages = [{"role": "user", "content": "Say hello."}]
    output = smol.chat(messages, GREEDY)[0]
    ids = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert output.prompt_token_ids == ids
    assert "<|im_end|>" not in output.text


def test_the_example_drafter_runs(smol, smollm2):
    spec = importlib.util.spec_from_file_location("own_drafter", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    want = smol.generate(TEXTS[0], GREEDY)[0].token_ids
    drafter, smol.engine.round.drafter = smol.engine.round.drafter, module.BigramDrafter()
    try:
        output = smol.generate(TEXTS[0], GREEDY)[0]
    finally:
        smol.engine.round.drafter = drafter
    assert output.token_ids == want
    assert output.stats.acceptance_length > 1.2
    assert smol.engine.drafter_error is None


def test_samples_differ_and_seeds_reproduce_them(model):
    with LLM(model, max_rows=4, max_model_len=64) as llm:
        outputs = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=1.0, n=4))
        assert [o.index for o in outputs] == [0, 1, 2, 3]
        assert len({tuple(o.token_ids) for o in outputs}) == 4  # odds of a tie: below 6 / 90**8 for a flat model
        for output in outputs:
            again = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=1.0, seed=output.seed))[0]
            assert again.token_ids == output.token_ids


def test_first_three_tokens_follow_the_model(model):
    """Chi-square of 1,500 seeds at each of three positions given the most common prefix; p < 1e-4 fails: three tests,
    so odds of a false alarm of 3 in 10,000, once, since the seeds are fixed."""
    with LLM(model, max_rows=64, max_model_len=16, drafter="lookup") as llm:
        params = [SamplingParams(max_tokens=3, temperature=0.5, seed=s) for s in range(1500)]
        drawn = torch.tensor([o.token_ids for o in llm.generate([[1, 2]] * 1500, params)])
    prefix = [1, 2]
    for position in range(3):
        with torch.inference_mode():
            p = (model(torch.tensor([prefix])).logits[0, -1].double() / 0.5).softmax(0)
        counts = drawn[:, position].bincount(minlength=VOCAB).double()
        expected = p * len(drawn)
        common = expected >= 5
        assert common.sum() >= 3
        observed = torch.cat([counts[common], counts[~common].sum()[None]])
        wanted = torch.cat([expected[common], expected[~common].sum()[None]])
        assert scipy.stats.chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-4
        most = int(counts.argmax())
        drawn = drawn[drawn[:, position] == most]
        prefix.append(most)


def test_one_bad_prompt_fails_alone(model):
    with LLM(model, max_rows=4, max_model_len=64) as llm:
        alone = llm.generate([5, 6, 7], GREEDY)[0]
        outputs = llm.generate([[5, 6, 7], [VOCAB], [], [5, 6, 7], list(range(90))], GREEDY)
        assert [o.finish_reason for o in outputs] == ["length", "error", "error", "length", "error"]
        assert outputs[0].token_ids == outputs[3].token_ids == alone.token_ids
        assert [o.prompt_index for o in outputs] == [0, 1, 2, 3, 4]
        assert all(str(o.error).startswith("prompt: expected") for o in outputs if o.error)
        with pytest.raises(ValueError, match="prompt: expected token ids in 0..96, got 97"):
            llm.generate([VOCAB], GREEDY)


def test_requests_of_many_threads(model):
    with LLM(model, max_rows=3, max_model_len=64, drafter="lookup") as llm:
        want = {i: llm.generate([i, i + 1, i], GREEDY)[0].token_ids for i in range(12)}
        got = {}

        def ask(i):
            got[i] = llm.submit([i, i + 1, i], GREEDY).result().token_ids

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == want


def test_awaiting_and_cancelling(model):
    with LLM(model, max_rows=2, max_model_len=128) as llm:

        async def ask():
            return await asyncio.gather(*(as_task(llm, i) for i in range(3)))

        async def as_task(llm, i):
            return await llm.submit([i + 1], GREEDY)

        assert [len(o.token_ids) for o in asyncio.run(ask())] == [24, 24, 24]
        handle = llm.submit([1, 2], SamplingParams(max_tokens=100, temperature=0.0))
        for _ in handle:
            handle.cancel()
        output = handle.results()[0]
        assert output.finish_reason == "cancelled"
        assert 0 < len(output.token_ids) < 100
        handle.cancel()  # again, after its end: nothing happens


def test_closing_ends_what_runs_and_refuses_more(model):
    llm = LLM(model, max_rows=1, max_model_len=128)
    handles = [llm.submit([1, 2], SamplingParams(max_tokens=120, temperature=0.0)) for _ in range(3)]
    llm.close()
    assert {h.results()[0].finish_reason for h in handles} <= {"error", "length"}
    with pytest.raises(RuntimeError, match="closed"):
        llm.submit([1, 2])
    llm.close()


def test_two_llms_on_one_model_object_are_refused(model):
    with LLM(model, max_rows=1) as llm:
        with pytest.raises(ValueError, match="model: this LlamaForCausalLM object is in use by another LLM"):
            LLM(model)
        assert len(llm.generate([1], GREEDY)[0].token_ids) == 24


def test_the_model_stays_itself(model):
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    state = {name: t.clone() for name, t in model.state_dict().items()}
    before, attention = model(ids).logits, model.config._attn_implementation
    with LLM(model, max_rows=2, max_model_len=64, drafter="lookup") as llm:
        first = llm.generate([3, 1, 4], GREEDY)[0]
        assert torch.equal(model(ids).logits, before)
        assert model.config._attn_implementation == attention
        assert torch.equal(
            model.generate(ids[:, :3], max_new_tokens=24, do_sample=False)[0, 3:], torch.tensor(first.token_ids)
        )
    assert torch.equal(model(ids).logits, before)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert not any("specdec" in name for module in model.modules() for name in vars(module))
    assert generate(model, [3, 1, 4], max_tokens=24, temperature=0.0)[0].token_ids == first.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_smollm2_is_the_same_for_every_drafter(smol, smollm2, temperature):
    """None, look-up, and the model's own first six layers as a draft model: the same tokens, greedy or with a seed."""
    part = copy.deepcopy(smollm2.model)
    part.model.layers, part.config.num_hidden_layers = part.model.layers[:6], 6
    one, texts = {"max_tokens": 10, "temperature": temperature, "seed": 4}, list(TEXTS[::2])
    alone = [o.token_ids for o in smol.generate(texts, SamplingParams(**one, k=0))]
    assert [o.token_ids for o in smol.generate(texts, SamplingParams(**one, k=6))] == alone
    options = {"drafter": part, "k": 3, "max_model_len": 256, "max_rows": 2}
    with LLM(copy.deepcopy(smollm2.model), tokenizer=smollm2.tokenizer, **options) as llm:
        outputs = llm.generate(texts, SamplingParams(**one))
    assert [o.token_ids for o in outputs] == alone
    assert sum(o.stats.drafted for o in outputs) > 0


def test_the_first_sample_is_the_single_requests(model):
    with LLM(model, max_rows=4, max_model_len=64, drafter="lookup", seed=11) as llm:
        several = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=1.0, n=3, seed=7))
        single = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=1.0, seed=7))[0]
        assert several[0].token_ids == single.token_ids == plain("llama", (1, 2, 3), 8, params(1.0, seed=7))[3:]
        assert (several[0].seed, single.seed) == (7, 7)
        unseeded = [llm.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=1.0))[0] for _ in range(2)]
    with LLM(model, max_rows=4, max_model_len=64, seed=11) as llm:
        llm.generate([[1], [1]], SamplingParams(max_tokens=1))  # the requests' numbers count, not what they ask
        again = [llm.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=1.0))[0] for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids
    assert [o.seed for o in again] == [o.seed for o in unseeded]


@pytest.mark.parametrize("at", range(1, 20, 3))
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_stop_string_at_every_offset_of_a_round(model, length, at):
    """Rounds of eight accepted tokens: a stop that begins in one and ends in another cuts where plain decoding cuts."""
    full = plain("llama", (1, 2, 3), 24, params())
    text = Letters().decode(full[3:])
    stop = text[at : at + length]
    oracle = Oracle()
    oracle.known.append((full, 0))
    with LLM(model, tokenizer=Letters(), drafter=oracle, k=7, max_rows=1, max_model_len=64) as llm:
        asked = SamplingParams(max_tokens=24, temperature=0.0, seed=0, stop=stop)
        output, pieces = llm.generate([1, 2, 3], asked)[0], list(llm.stream([1, 2, 3], asked))
    cut = text.index(stop)
    assert (output.text, output.finish_reason) == (text[:cut], "stop")
    assert output.token_ids == full[3 : 3 + cut + length]
    assert "".join(p.text for p in pieces) == output.text
    assert [t for p in pieces for t in p.token_ids] == output.token_ids
    assert output.stats.acceptance_length > 2 or len(output.token_ids) < 8


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_more_stop_ids_than_a_row_holds(model, lag):
    full = plain("llama", (1, 2, 3), 24, params())
    unseen = [t for t in range(VOCAB) if t not in full][:20]
    with LLM(model, drafter="lookup", max_rows=1, max_model_len=64, lag=lag) as llm:
        asked = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(*unseen, full[9]))
        output = llm.generate([1, 2, 3], asked)[0]
    assert output.token_ids == full[3 : full.index(full[9], 3) + 1]
    assert output.finish_reason == "stop"


def test_streams_of_several_samples_and_leaving_one_early(model):
    with LLM(model, tokenizer=Letters(), max_rows=3, max_model_len=64) as llm:
        asked = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3)
        outputs, pieces = llm.generate("abc", asked), list(llm.stream("abc", asked))
        for output in outputs:
            mine = [p for p in pieces if p.index == output.index]
            assert "".join(p.text for p in mine) == output.text
            assert [p.finished for p in mine] == [False] * (len(mine) - 1) + [True]
        for _ in llm.stream("abc", SamplingParams(max_tokens=60, temperature=0.0)):
            break  # cancels what is left
        assert llm.generate("abc", asked)[2].token_ids == outputs[2].token_ids


def test_handles_may_be_read_twice_and_by_several_threads(model):
    with LLM(model, max_rows=2, max_model_len=64) as llm:
        handle = llm.submit([1, 2, 3], GREEDY)
        got = []
        threads = [threading.Thread(target=lambda: got.append(handle.result().token_ids)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [handle.result().token_ids] * 4
        assert handle.done
        for _ in range(2):  # from the first piece on
            assert [t for piece in handle for t in piece.token_ids] == got[0]


def test_a_dropped_llm_lets_go_of_its_model(model):
    """With its requests ended, and while one that nobody holds still runs: then when that has ended."""
    for running in (False, True):
        llm = LLM(model, max_rows=1, max_model_len=64)
        assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == 24
        thread = llm._worker._thread
        if running:
            llm.submit([1, 2, 3], GREEDY)
        del llm
        gc.collect()
        thread.join(timeout=60)
        assert not thread.is_alive()
    with LLM(model, max_rows=1, max_model_len=64) as again:
        assert len(again.generate([1, 2, 3], GREEDY)[0].token_ids) == 24


def test_a_handle_keeps_its_llm(model):
    handle = LLM(model, max_rows=1, max_model_len=64).submit([1, 2, 3], GREEDY)
    gc.collect()
    assert len(handle.result().token_ids) == 24
    del handle
    gc.collect()
    with LLM(model, max_rows=1, max_model_len=64):
        pass


@pytest.mark.parametrize("drafts", [False, True])
def test_models_in_training_mode_are_refused(model, drafts):
    """Dropout would make what is decoded no function of the tokens, and drafts no copy of it."""
    other = copy.deepcopy(model)
    with LLM(model, drafter=other, k=2, max_rows=1, max_model_len=64) as llm:
        want = llm.generate([1, 2, 3], GREEDY)[0].token_ids
        last = (other if drafts else model).model.layers[-1].mlp
        last.train()
        with pytest.raises(
            RuntimeError, match=r"model: this LlamaForCausalLM is in training mode.*; call its eval\(\)"
        ):
            llm.generate([1, 2, 3], GREEDY)
        last.eval()
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == want


def test_cancelled_before_it_starts(model):
    with LLM(model, max_rows=1, max_model_len=128) as llm:
        handles = [llm.submit([i + 1], SamplingParams(max_tokens=100, temperature=0.0)) for i in range(4)]
        for handle in handles[1:]:
            handle.cancel()
        assert [h.result().finish_reason for h in handles] == ["length"] + ["cancelled"] * 3
        assert handles[3].result().token_ids == []


def test_a_model_in_use_can_be_saved_and_trained(model, tmp_path):
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    mine = copy.deepcopy(model)
    with LLM(mine, max_rows=2, max_model_len=64) as llm:
        llm.generate([3, 1, 4], GREEDY)
        mine.save_pretrained(tmp_path)
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(saved(ids).logits, mine(ids).logits)
        mine(ids, labels=ids).loss.backward()
        torch.optim.SGD(mine.parameters(), lr=0.5).step()
        assert not torch.allclose(saved(ids).logits, mine(ids).logits)
        llm.reset_prefix_cache()
        want = mine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0, 5:]
        assert llm.generate(ids[0].tolist(), GREEDY)[0].token_ids == want.tolist()


def test_one_llm_after_another_on_a_model_object(model):
    outputs = []
    for drafter in (None, "lookup", copy.deepcopy(model)):
        with LLM(model, drafter=drafter, max_rows=1, max_model_len=64) as llm:
            outputs.append(llm.generate([1, 2, 3], GREEDY)[0].token_ids)
    assert outputs[0] == outputs[1] == outputs[2] == plain("llama", (1, 2, 3), 24, params())[3:]


def test_pickled_weights_need_a_word_of_trust(model, tmp_path):
    """For the target and for a drafter alike."""
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="allow_pickle=True"):
        LLM(tmp_path, device="cpu")
    with LLM(tmp_path, drafter=tmp_path, device="cpu", allow_pickle=True) as llm:
        assert len(llm.generate([1, 2], SamplingParams(max_tokens=3, temperature=0.0))[0].token_ids) == 3


@pytest.mark.parametrize("messages", ["hello", ["hello"], {"role": "user"}, [[{"role": "user"}, "x"]]])
def test_messages_that_are_none_are_named(smol, messages):
    with pytest.raises(TypeError, match="messages: expected dicts like"):
        smol.chat(messages)


@pytest.mark.parametrize("bad", [{"k": "x"}, {"k": -1}, {"drafter": object()}, {"drafter": 3}])
def test_what_needs_no_weights_is_said_before_they_are_loaded(bad):
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(bad))}: expected"):
        LLM("/no/such/model", **bad)
