"""PagedModel.extend against transformers' own forward: ragged chunks of several sequences, in any cut."""

import copy

import pytest
import torch
from support import CONFIGS, VOCAB, tiny

from specdec.kernels.round import slots
from specdec.kvpool import KVPool
from specdec.model import Packed, PagedModel

BLOCK_SIZE, WIDTH = 4, 8


def packed_of(chunks, tables):
    """Packed tokens of chunks [(row, ids of the whole row, start, end)] over block tables [rows, WIDTH]."""
    row = torch.tensor([r for r, _, start, end in chunks for _ in range(start, end)])
    order = torch.tensor([i for i, (_, _, start, end) in enumerate(chunks) for _ in range(start, end)])
    positions = torch.tensor([p for _, _, start, end in chunks for p in range(start, end)])
    table = tables[[r for r, *_ in chunks]]
    ends = torch.tensor([0] + [end - start for _, _, start, end in chunks]).cumsum(0).int()
    return Packed(
        token_ids=torch.tensor([t for _, ids, start, end in chunks for t in ids[start:end]]),
        positions=positions,
        slot_mapping=slots(table, order, positions, torch.ones_like(row, dtype=torch.bool), BLOCK_SIZE),
        block_table=table,
        seq_lens=torch.tensor([end for *_, end in chunks]).int(),
        cu_seqlens_q=ends,
        max_seqlen_q=max(end - start for _, _, start, end in chunks),
    )


@pytest.fixture
def setting():
    """A function that pages a tiny model: (paged, texts, tables, logits of each text by an ordinary forward)."""
    opened = []

    def make(name):
        model = copy.deepcopy(tiny(name))
        generator = torch.Generator().manual_seed(3)
        texts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (19, 5, 1)]
        want = [model(torch.tensor([t])).logits[0] for t in texts]
        pool = KVPool(3 * WIDTH, BLOCK_SIZE, poison=True)
        paged = PagedModel(model, pool, "target")
        opened.append(paged)
        return paged, texts, torch.randperm(3 * WIDTH, generator=generator).view(3, WIDTH).int(), want

    yield make
    for paged in opened:
        paged.close()


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cuts", [(19,), (1, 19), (7, 8, 15, 16, 19)])
def test_ragged_chunks_give_the_whole_texts_logits(setting, name, cuts):
    paged, texts, tables, want = setting(name)
    got = [[] for _ in texts]
    start = 0
    for end in cuts:
        chunks = [(r, t, start, min(end, len(t))) for r, t in enumerate(texts) if start < len(t)]
        logits, packed = None, packed_of(chunks, tables)
        logits = paged.extend(packed)
        for (r, *_), a, b in zip(chunks, packed.cu_seqlens_q[:-1], packed.cu_seqlens_q[1:], strict=True):
            got[r].append(logits[a:b])
        start = end
    for parts, whole in zip(got, want, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_rejected_tokens_are_rolled_back_by_running_over_them(setting):
    """Wrong tokens past position 9 leave no trace once other ones are extended from there."""
    paged, texts, tables, want = setting("llama")
    paged.extend(packed_of([(0, texts[0][:9] + [0] * 6, 0, 15)], tables))
    got = paged.extend(packed_of([(0, texts[0], 9, 19)], tables))
    torch.testing.assert_close(got, want[0][9:], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
def test_taps_note_hidden_states(setting, name):
    """After layer i: what transformers calls hidden_states[i + 1], of packed tokens in their order."""
    paged, texts, tables, _ = setting(name)
    taps = paged.tap([0])
    paged.extend(packed_of([(r, t, 0, len(t)) for r, t in enumerate(texts)], tables))
    got = taps.hidden[0].clone()
    want = [paged.model(torch.tensor([t]), output_hidden_states=True).hidden_states[1][0] for t in texts]
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-4)
    assert torch.equal(taps.hidden[0], got), "an ordinary forward was noted"
    taps.close()
    paged.extend(packed_of([(1, texts[1], 0, 5)], tables))
    assert taps.hidden == {}


def test_a_tap_on_no_layer_is_refused_and_leaves_nothing(setting):
    paged, *_ = setting("llama")
    hooks = lambda: [len(module._forward_hooks) for module in paged.model.modules()]  # noqa: E731
    before = hooks()  # transformers leaves some of its own
    with pytest.raises(ValueError, match="layers: expected numbers of 0 to 1, got 2"):
        paged.tap([0, 2])
    assert hooks() == before


@torch.inference_mode()
def test_a_deep_copy_of_a_model_in_use_has_its_own_weights(setting):
    paged, texts, *_ = setting("llama")
    other = copy.deepcopy(paged.model)
    ids = torch.tensor([texts[0]])
    want = other(ids).logits
    for weight in paged.model.parameters():
        weight.zero_()
    assert torch.equal(other(ids).logits, want)
