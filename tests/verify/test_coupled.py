"""Coupled sampling: what is accepted, and that what is emitted has the target's distribution, whoever drafts."""

import pytest
import scipy.stats
import torch
from support import VOCAB, tiny

from specdec.draft import Draft
from specdec.kernels import Sampling, sample
from specdec.model import Packed
from specdec.rows import RowView
from specdec.verify import CoupledVerifier, Verification

SEEDS = 800


def columns(seeds, temperature=1.0, **filters):
    n = len(seeds)
    return Sampling(
        temperature=torch.full((n,), temperature),
        top_k=torch.full((n,), filters.get("top_k", 0)).int(),
        top_p=torch.full((n,), filters.get("top_p", 1.0)),
        min_p=torch.full((n,), filters.get("min_p", 0.0)),
        seed=seeds,
    )


def accept(logits, drafts, lengths, sampling, stop_ids=None, running=None):
    """The verifier on rows of equal width: logits [B, k + 1, V], drafts [B, k]; row r has lengths[r] tokens."""
    batch, width = logits.shape[:2]
    row = torch.arange(batch).repeat_interleave(width)
    positions = (lengths[:, None] - 1 + torch.arange(width)).flatten()
    cu = torch.arange(0, batch * width + 1, width, dtype=torch.int32)
    running = torch.ones(batch, dtype=torch.bool) if running is None else running
    packed = Packed(positions, positions, positions, positions, positions, cu, width)
    stops = torch.full((batch, 8), -1)
    if stop_ids is not None:
        stops[:, 0] = stop_ids
    view = RowView(
        *[lengths] * 8, stop_ids=stops, sampling=sampling, block_size=4, max_len=99, noise=True, filters=True
    )
    verification = Verification(packed, row, torch.full((batch,), width - 1), running)
    return CoupledVerifier(logits.shape[-1]).accept(logits.flatten(0, 1), verification, Draft(drafts, lengths), view)


def drawn(logits, lengths, sampling):
    """The target's token at each position, drawn one at a time."""
    return torch.stack([sample(logits[:, j].contiguous(), lengths + j, sampling) for j in range(logits.shape[1])], 1)


def case(seed=0, batch=5, k=3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, k + 1, VOCAB, generator=generator) * 2
    return logits, torch.tensor([1, 5, 9, 2, 30][:batch]), columns(torch.arange(batch) * 7919)


@pytest.mark.parametrize("right", range(4))
def test_right_drafts_are_kept_up_to_the_first_wrong_one(right):
    logits, lengths, sampling = case()
    truth = drawn(logits, lengths, sampling)
    drafts = truth[:, :3].clone()
    drafts[:, right:] = (drafts[:, right:] + 1) % VOCAB
    out = accept(logits, drafts, lengths, sampling)
    assert out.num_accepted.tolist() == [right] * 5
    assert out.num_emitted.tolist() == [right + 1] * 5
    assert out.token_ids[:, : right + 1].equal(truth[:, : right + 1])
    assert (out.token_ids[:, right + 1 :] == -1).all()
    assert not out.ended.any()
    assert not out.failed.any()


@pytest.mark.parametrize("at", range(4))
def test_a_stop_id_cuts_a_round(at):
    logits, lengths, sampling = case()
    truth = drawn(logits, lengths, sampling)
    out = accept(logits, truth[:, :3], lengths, sampling, stop_ids=truth[:, at])
    first = [row.tolist().index(row[at]) for row in truth]
    assert out.num_emitted.tolist() == [i + 1 for i in first]
    assert out.num_accepted.tolist() == [3] * 5
    assert out.ended.all()


def test_a_row_that_does_not_run_emits_nothing():
    logits, lengths, sampling = case()
    running = torch.tensor([True, False, True, False, True])
    out = accept(logits, drawn(logits, lengths, sampling)[:, :3], lengths, sampling, running=running)
    assert out.num_emitted.tolist() == [4, 0, 4, 0, 4]
    assert (out.token_ids[~running] == -1).all()
    assert not (out.ended | out.failed)[~running].any()


@pytest.mark.parametrize("at", range(4))
def test_nan_fails_its_row_only_where_the_row_gets_there(at):
    logits, lengths, sampling = case()
    truth = drawn(logits, lengths, sampling)
    drafts = truth[:, :3].clone()
    drafts[0, 0] += 1  # row 0 is rejected at once, so that only NaN in its first place matters
    logits[:2, at] = float("nan")
    out = accept(logits, drafts % VOCAB, lengths, sampling)
    assert out.failed.tolist() == [at == 0, True, False, False, False]
    assert out.num_emitted.tolist() == [int(at > 0), at, 4, 4, 4]


@pytest.mark.parametrize(
    ("drafts", "filters"),
    [
        ("likely", {}),
        ("constant", {}),
        ("same noise", {}),
        ("same noise", {"top_k": 5}),
        ("same noise", {"top_p": 0.8}),
        ("same noise", {"min_p": 0.05}),
    ],
)
def test_emitted_tokens_have_the_targets_distribution(drafts, filters):
    """Chi-square of the first two emitted tokens over 800 seeds, with drafts that know the noise and ones that don't.

    12 tests (6 cases, two positions) fail at p < 1e-5: odds of a false alarm 1 in 8,000, once, for the seeds are fixed.
    """
    torch.manual_seed(5)
    one = torch.randn(2, VOCAB) * 1.5
    near = one + torch.randn(2, VOCAB) * 0.5
    logits, lengths = one.expand(SEEDS, 2, VOCAB).contiguous(), torch.full((SEEDS,), 6)
    sampling = columns(torch.arange(SEEDS), temperature=0.8, **filters)
    proposed = {
        "likely": near[:1].argmax(-1).expand(SEEDS, 1),
        "same noise": drawn(near[:1].expand(SEEDS, 1, VOCAB).contiguous(), lengths, sampling),
        "constant": torch.full((SEEDS, 1), 3),
    }[drafts]
    out = accept(logits, proposed, lengths, sampling)
    chance = [filtered(one[j] / 0.8, **filters) for j in range(2)]
    assert_follows(out.token_ids[:, 0], chance[0])
    assert_follows(out.token_ids[out.num_emitted > 1, 1], chance[1])


def filtered(logits, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution after the filters, in fp64."""
    p = logits.double().softmax(0)
    if top_k:
        p[p < p.topk(top_k).values[-1]] = 0
    if top_p < 1:
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def assert_follows(tokens, p):
    counts, expected = tokens.bincount(minlength=VOCAB).double(), p * len(tokens)
    assert (counts[p == 0] == 0).all(), "a token that the filters remove was emitted"
    if len(tokens) < 200:
        return  # too few got this far to say anything
    common = expected >= 5
    rest = counts[~common].sum(), expected[~common].sum()
    observed, wanted = counts[common], expected[common]
    if rest[1] > 0:
        observed, wanted = torch.cat([observed, rest[0][None]]), torch.cat([wanted, rest[1][None]])
    assert scipy.stats.chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-5


def test_the_coupling_accepts_what_it_promises():
    """Drafts with the target's noise agree at least as often as two draws with one noise must: sum min(p, q) / (2 - it).

    The bound is that of Daliri et al. (arXiv 2408.07978); over 800 seeds the mean has a standard error below 0.018,
    and five of them are allowed: odds of a false alarm below 1e-6.
    """
    p, q = (tiny(noise=noise)(torch.tensor([[1, 2, 3]])).logits[0, -1].detach() for noise in (0.0, 0.01))
    sampling, lengths = columns(torch.arange(SEEDS)), torch.full((SEEDS,), 3)
    logits = p.expand(SEEDS, 2, VOCAB).contiguous()
    drafts = drawn(q.expand(SEEDS, 1, VOCAB).contiguous(), lengths, sampling)
    accepted = accept(logits, drafts, lengths, sampling).num_accepted.double().mean()
    overlap = torch.minimum(p.softmax(0), q.softmax(0)).sum()
    assert accepted > overlap / (2 - overlap) - 5 * 0.018
    greedy = accept(logits, q.argmax().expand(SEEDS, 1), lengths, sampling).num_accepted.double().mean()
    assert accepted > greedy
