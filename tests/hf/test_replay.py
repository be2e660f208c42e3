"""Stopping criteria and streamers see what transformers' own loop shows them, whatever the rows emit a round."""

import copy

import pytest
import tokenizers
import torch
import transformers
from hf.prompts import PAD, an_end, batch, own
from support import VOCAB, tiny
from transformers.generation import StoppingCriteria, StoppingCriteriaList

import specdec.hf

GREEDY = {"do_sample": False, "max_new_tokens": 12}
ONE = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}


@pytest.fixture(scope="module")
def model():
    """Enabled with a drafter that is mostly right, so that rows run ahead of each other."""
    model, near = copy.deepcopy(tiny("llama")), copy.deepcopy(tiny("llama", noise=0.01))
    with specdec.hf.enable(model, drafter=near, k=4):
        yield model


@pytest.fixture(scope="module")
def tokenizer():
    """One character a token."""
    vocab = {chr(33 + i): i for i in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="!"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="!", pad_token="!")


class Recorder(StoppingCriteria):
    """Stops row r once it is `length(r)` long, and notes every batch that it was shown."""

    def __init__(self, *lengths: int):
        self.lengths, self.seen = torch.tensor(lengths), []

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        self.seen.append(input_ids.clone())
        return input_ids.shape[1] >= self.lengths


class Streamer:
    def __init__(self, fail_at: int = 1 << 30):
        self.put_, self.ended, self.fail_at = [], 0, fail_at

    def put(self, value):
        self.put_.append(value.clone())
        if len(self.put_) > self.fail_at:
            raise InterruptedError("enough")

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": an_end(), "pad_token_id": 3}])
@pytest.mark.parametrize("lengths", [(23, 23, 23, 23), (25, 20, 99, 22), (99, 99, 99, 99), (20, 21, 22, 30)])
def test_criteria_see_every_batch_as_in_transformers(model, lengths, ends):
    """Without an end token a row that a criterion stopped is decoded on until all have stopped, as there."""
    ours, theirs = Recorder(*lengths), Recorder(*lengths)
    out = model.generate(**batch(), **GREEDY, **ends, stopping_criteria=StoppingCriteriaList([ours]))
    assert torch.equal(out, own(**ends, stopping_criteria=StoppingCriteriaList([theirs])))
    assert len(ours.seen) == len(theirs.seen)
    assert all(torch.equal(a, b) for a, b in zip(ours.seen, theirs.seen, strict=True))


@pytest.mark.parametrize("ended", [False, True])
def test_stop_strings(model, tokenizer, ended):
    text = own()
    never = next(token for token in range(4, VOCAB) if token not in text)
    ends = {"eos_token_id": never, "pad_token_id": 3} if ended else {}
    for row, at in ((0, 3), (2, 8), (3, 9)):
        stop = tokenizer.decode(text[row, 19 + at : 19 + at + 2])
        kwargs = {"stop_strings": [stop], "tokenizer": tokenizer, **ends}
        out = model.generate(**batch(), **GREEDY, **kwargs)
        assert torch.equal(out, own(**kwargs))
        one = {"input_ids": batch()["input_ids"][row : row + 1, -(batch()["attention_mask"][row].sum()) :]}
        assert torch.equal(model.generate(**one, **GREEDY, **kwargs), own(inputs=one, **kwargs))


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": an_end(), "pad_token_id": 3}])
def test_a_streamer_gets_a_batch_a_step(model, ends):
    ours, theirs = Streamer(), Streamer()
    model.generate(**batch(), **GREEDY, **ends, streamer=ours)
    own(**ends, streamer=theirs)
    assert ours.ended == theirs.ended == 1 and len(ours.put_) == len(theirs.put_)
    assert all(torch.equal(a, b) for a, b in zip(ours.put_, theirs.put_, strict=True))


def test_a_text_streamer(model, tokenizer, capsys):
    model.generate(**ONE, **GREEDY, streamer=transformers.TextStreamer(tokenizer))
    ours = capsys.readouterr().out
    own(inputs=ONE, streamer=transformers.TextStreamer(tokenizer))
    assert ours == capsys.readouterr().out and len(ours) >= 17


def test_a_custom_loops_streamer(model):
    streamer = Streamer()
    model.generate(**batch(), **GREEDY, custom_generate=specdec.hf.generate, specdec_streamer=streamer)
    assert torch.equal(torch.stack(streamer.put_, 1), own()[:, 19:]) and streamer.ended == 1
    with pytest.raises(ValueError, match="streamer: .* pass specdec_streamer="):
        model.generate(**batch(), **GREEDY, custom_generate=specdec.hf.generate, streamer=streamer)


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": an_end(at=3), "pad_token_id": PAD}])
def test_criteria_see_the_scores_that_are_asked_for(model, ends):
    """Of the rows that run; transformers draws scores for ended ones, too."""
    seen = []

    def surest(input_ids, scores, **kwargs):
        seen.append(torch.stack(scores))
        return scores[-1].softmax(-1).amax(-1) > 0.999

    call = {**GREEDY, **ends, "stopping_criteria": [surest], "output_scores": True, "return_dict_in_generate": True}
    ours, in_ours = model.generate(**batch(), **call).sequences, [*seen]
    seen.clear()
    assert torch.equal(ours, tiny("llama").generate(**batch(), **call).sequences)
    assert len(in_ours) == len(seen) > 3
    for mine, theirs in zip(in_ours, seen, strict=True):
        runs = mine.abs().amax(-1) > 0
        assert runs[0].all() and torch.allclose(mine[runs], theirs[runs], atol=1e-4)


def test_no_time_is_one_token(model):
    out = model.generate(**batch(), **GREEDY, max_time=0.0)
    assert torch.equal(out, own(max_new_tokens=1))
    assert torch.equal(model.generate(**batch(), **GREEDY, max_time=1e6), own())


def test_a_failing_streamer_or_criterion_leaves_the_model_usable(model):
    class Failing(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise ZeroDivisionError

    streamer = Streamer(fail_at=3)
    with pytest.raises(InterruptedError):
        model.generate(**batch(), **GREEDY, streamer=streamer)
    with pytest.raises(ZeroDivisionError):
        model.generate(**batch(), **GREEDY, stopping_criteria=[Failing()])
    assert streamer.ended == 0
    assert torch.equal(model.generate(**batch(), **GREEDY), own())


def test_generate_within_a_streamer_is_refused(model):
    class Nested(Streamer):
        def put(self, value):
            if self.put_:
                model.generate(**ONE, **GREEDY)
            super().put(value)

    with pytest.raises(RuntimeError, match="is decoding"):
        model.generate(**batch(), **GREEDY, streamer=Nested())
    assert torch.equal(model.generate(**batch(), **GREEDY), own())


def test_rows_that_wait_for_a_place(tokenizer):
    """Fewer rows than the batch has: steps are replayed late, and to the same end."""
    model = copy.deepcopy(tiny("llama"))
    stop = tokenizer.decode(own()[3, 19 + 5 : 19 + 7])
    kwargs = {"stop_strings": [stop], "tokenizer": tokenizer, "eos_token_id": 95, "pad_token_id": PAD}
    with specdec.hf.enable(model, plain=True, max_rows=2):
        assert torch.equal(model.generate(**batch(), **GREEDY, **kwargs), own(**kwargs))
