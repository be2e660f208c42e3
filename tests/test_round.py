"""The round's own steps, and that none of them looks at the device: shapes come from the round's shape alone."""

import sys

import pytest
import torch
from support import VOCAB, Request, engine, params, submit

from specdec.draft import Draft
from specdec.round import RoundShape, grant
from specdec.verify import VERIFIERS

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero")
WATCHED = ("round.py", "rows.py", "draft", "verify", "model", "noise.py", "distribution.py")


def forbid_reads(monkeypatch):
    """From here on every look of our own device code at a tensor's value raises. Kernels are exempt: their CPU twins may."""

    def forbid(name, original):
        def read(self, *args, **kwargs):
            frame = sys._getframe(1)
            path = frame.f_code.co_filename.replace("\\", "/")
            if "/specdec/" in path and path.split("/specdec/")[-1].split("/")[0] in WATCHED:
                raise AssertionError(f"{path}:{frame.f_lineno} reads a tensor with {name}")
            return original(self, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, forbid(name, getattr(torch.Tensor, name)))


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("drafter", ["none", "lookup", "near"])
def test_no_read_inside_a_round(drafter, verifier, monkeypatch):
    e = engine(drafter=drafter, k=3, verifier=verifier)
    asked = {"repetition_penalty": 1.3, "min_tokens": 2, "stop_token_ids": (7,), "bad_words": ((1, 2),)}
    submit(e, [Request([1, 2, 3, 1, 2, 3, 1], 12, params(temperature=t, seed=1, **asked)) for t in (0.0, 1.0)])
    e.step()
    index = torch.tensor([0, 1, -1])  # the last is padding
    shape = RoundShape(
        draft_steps=3, tokens=9, noise=True, filters=True, adjusted=True, logprobs=5, processed_logprobs=0
    )
    forbid_reads(monkeypatch)
    for _ in range(3):
        result = e.round.run(index, shape)
        assert result.values.shape == (3, 8 + 4)
        assert result.logprobs.shape == (3, 4, 11 + 1)


def test_padding_and_stopped_rows_write_nothing():
    """A padded or inactive row leaves every slot of the pool as it was, whatever its old table says."""
    e = engine(drafter="same", k=3)
    submit(e, [Request([1, 2, 3, 4, 5, 6], 12, params(k=3))])
    e.step()
    row = e.scheduler.running[0].row
    e.rows.active[row] = False
    before = [t.clone() for name in ("target", "drafter") for pair in e.pool.kv(name) for t in pair]
    result = e.round.run(torch.tensor([row, -1, -1]), RoundShape(3, 12, True, True))
    after = [t for name in ("target", "drafter") for pair in e.pool.kv(name) for t in pair]
    assert all(torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) for a, b in zip(before, after, strict=True))
    assert result.values[:, 0].tolist() == [0, 0, 0]


def draft(counts, scores, k=3):
    return Draft(torch.zeros(len(counts), k).long(), torch.tensor(counts), scores=torch.tensor(scores))


def test_grant_gives_the_best_drafts_and_keeps_prefixes():
    scores = [[0.9, 0.8, 0.1], [0.5, 0.4, 0.3], [0.95, 0.2, 0.1]]
    running = torch.tensor([True, True, True])
    assert grant(draft([3, 3, 3], scores), running, 3).tolist() == [0, 0, 0]
    assert grant(draft([3, 3, 3], scores), running, 6).tolist() == [2, 0, 1]
    assert grant(draft([3, 3, 3], scores), running, 7).tolist() == [2, 1, 1]
    assert grant(draft([1, 3, 0], scores), running, 6).tolist() == [1, 2, 0]
    assert grant(draft([3, 3, 3], scores), running, None).tolist() == [3, 3, 3]


def test_grant_shares_ties_by_depth():
    running = torch.tensor([True, True])
    assert grant(draft([3, 3], [[0.5] * 3] * 2), running, 2 + 3).tolist() == [2, 1]


def test_illegal_drafts_are_cut():
    """A drafter that names tokens outside the vocabulary loses them, and all that follow in the row."""

    class Wild:
        def propose(self, rows, k):
            return torch.tensor([[1, VOCAB + 5, 2]]).expand(len(rows.lengths), k), torch.full_like(rows.lengths, 99)

    e = engine(k=3)
    e.drafter = e.round.drafter = Wild()
    request = submit(e, [Request([1, 2, 3], 9)])[0]
    e.run()
    assert request.seq.token_ids == request.want
    assert e.stats.drafted == e.stats.rounds - 1  # one legal draft a round; none in the last, where one token is left
