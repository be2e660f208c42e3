"""`adjust`: the twin against transformers' processors one row at a time, the kernels against the twin in the interpreter."""

from types import SimpleNamespace

import pytest
import torch
from support import params, processed

from specdec.adjustments import AdjustmentTables
from specdec.kernels import adjust
from specdec.kernels.adjust import tally
from specdec.kernels.backend import interpreted
from specdec.sequence import Sequence

V, K, MAX_LEN = 53, 4, 40
EOS = (7, 11)
KINDS = (
    {},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"repetition_penalty": 0.6, "frequency_penalty": 1.1},
    {"logit_bias": {3: 2.5, 9: float("-inf"), 0: -1.0}},
    {"allowed_token_ids": (1, 2, 3, 5, 7, 8)},
    {"bad_words": ((4,), (1, 2), (2, 1, 2), (1, 1), tuple(range(16)))},
    {"min_tokens": 6, "stop_token_ids": (2,)},
    {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "logit_bias": {2: 1.0, 1: 0.5},
        "bad_words": ((2, 3), (5,)),
        "min_tokens": 3,
    },
)


def case(columns=V, device="cpu", seed=0, repeats=1):
    """A round of rows of every kind, in an order of their own, and what `adjust` takes; few tokens, so that they repeat."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high, *size: torch.randint(0, high, size, generator=generator)  # noqa: E731
    kinds = KINDS * repeats
    tables = AdjustmentTables(len(kinds) + 1, V, torch.device(device))
    history = torch.full((len(kinds) + 1, MAX_LEN + 1), 10**6, dtype=torch.int32)
    seqs = []
    for row, kind in enumerate(kinds):
        prompt_len, total = 1 + int(draw(9)), 10 + int(draw(9))
        p = params(**kind)
        seq = Sequence(draw(4, prompt_len).tolist(), p, limit=MAX_LEN, eos=EOS)
        seq.token_ids += draw(4, total - prompt_len if row % 4 else 0).tolist()
        tables.join(row, seq)
        history[row, : len(seq)] = torch.tensor(seq.token_ids)
        seqs.append(seq)
    index = torch.randperm(len(kinds), generator=generator)
    known = SimpleNamespace(
        index=index.to(device), num_tokens=torch.tensor([len(seqs[i]) for i in index]).to(device),
        all_tokens=history.to(device),
    )  # fmt: skip
    drafts, widths = draw(4, len(kinds), K), 1 + draw(K + 1, len(kinds))
    rows = torch.arange(len(kinds)).repeat_interleave(widths)
    offset = torch.cat([torch.arange(w) for w in widths])
    positions = known.num_tokens.cpu()[rows] + offset
    logits = torch.randn(len(rows), columns, generator=generator) * 3
    logits[draw(9, *logits.shape) == 0] = 0.0
    return tables.columns, known, drafts.to(device), rows.to(device), positions.to(device), logits, seqs


def test_every_row_is_what_transformers_makes_of_it():
    columns, known, drafts, rows, positions, logits, seqs = case()
    got = adjust(logits, positions, columns, known, drafts, rows=rows)
    for t, (b, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        seq = seqs[known.index[b]]
        tokens = seq.token_ids + drafts[b, : position - len(seq)].tolist()
        want = processed(logits[t : t + 1], tokens, seq.prompt_len, seq.params, EOS)
        assert torch.equal(got[t], want[0]), (t, seq.params)


def test_a_drafter_adjusts_one_token_a_row_and_may_know_fewer():
    columns, known, drafts, _, _, logits, seqs = case(columns=40)
    for j in range(K):
        steps = drafts.t()[:j].t()  # strided, as a draft model leaves them
        got = adjust(logits[: len(seqs)], known.num_tokens + j, columns, known, steps)
        for b, i in enumerate(known.index.tolist()):
            tokens = seqs[i].token_ids + drafts[b, :j].tolist()
            wide = torch.nn.functional.pad(logits[b : b + 1], (0, V - 40))
            assert torch.equal(got[b], processed(wide, tokens, seqs[i].prompt_len, seqs[i].params, EOS)[0, :40])


@pytest.mark.parametrize("seed", range(3))
def test_counting_a_round_is_joining_after_it(seed):
    columns, known, drafts, *_, seqs = case(seed=seed)
    emitted = torch.arange(len(seqs)) % (K + 1)
    tally(columns, known.index, drafts, emitted)
    for b, i in enumerate(known.index.tolist()):
        seqs[i].token_ids += drafts[b, : emitted[b]].tolist()
    fresh = AdjustmentTables(len(seqs) + 1, V, torch.device("cpu"))
    for row, seq in enumerate(seqs):
        fresh.join(row, seq)
    assert torch.equal(columns.counts, fresh.columns.counts)


def whole(columns, known, drafts, rows, positions, logits, seqs):
    """Everything that the kernels give: a verification's logits, a draft step's, and the counts after a round."""
    logits = logits.to(drafts.device)
    verified = adjust(logits, positions, columns, known, drafts, rows=rows)
    drafted = adjust(logits[: len(seqs)], known.num_tokens + 2, columns, known, drafts.t()[:2].t())
    plain = adjust(logits[: len(seqs)], known.num_tokens, columns, known, drafts[:, :0])
    tally(columns, known.index, drafts, (torch.arange(len(seqs)) % (K + 1)).to(drafts.device))
    return verified, drafted, plain, columns.counts


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [V, 41, 60])
def test_kernels_give_what_their_twins_give(columns, dtype):
    want = whole(*(x.to(dtype) if i == 5 else x for i, x in enumerate(case(columns, seed=columns))))
    with interpreted():
        got = whole(*(x.to(dtype) if i == 5 else x for i, x in enumerate(case(columns, seed=columns))))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_bad_tensors_are_named():
    columns, known, drafts, rows, positions, logits, _ = case()
    with pytest.raises(ValueError, match=r"positions: expected shape"):
        adjust(logits, positions[1:], columns, known, drafts, rows=rows)
    with pytest.raises(ValueError, match=r"drafts: expected shape"):
        adjust(logits, positions, columns, known, drafts[1:], rows=rows)
