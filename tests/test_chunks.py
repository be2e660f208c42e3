"""Chunks laid out in a bucket, padding and all: the KV that they write without it, and nothing else."""

import copy

import pytest
import torch
from support import VOCAB, params, tiny

from specdec.chunks import ChunkShape, lay_out, packed
from specdec.kvpool import KVPool
from specdec.model import PagedModel
from specdec.scheduler import Chunk
from specdec.sequence import Sequence

BLOCK_SIZE, NUM_BLOCKS = 3, 20
TEXTS = [list(range(1, 18)), [7, VOCAB + 5, 9], [4] * 8]  # an id that the model has no embedding for


def chunks(pool, cut):
    """Positions `cut` .. of every text; those before it have run."""
    made = []
    for text in TEXTS:
        seq = Sequence(text, params(), limit=len(text) + 1)
        seq.table = pool.new_table()
        seq.table.grow(len(text))
        made.append(Chunk(seq, min(cut, len(text) - 1), len(text)))
    return made


def written(shape_of, cut):
    """All of the pool's KV after the texts ran up to `cut`, and then from there in the shape `shape_of` gives."""
    pool = KVPool(NUM_BLOCKS, BLOCK_SIZE, poison=True)
    paged = PagedModel(copy.deepcopy(tiny()), pool, "target")
    late = chunks(pool, cut)
    early = [Chunk(c.seq, 0, c.start) for c in late if c.start]
    for part, shape in ((early, ChunkShape.exact), (late, shape_of)):
        if part:
            room = shape(part)
            laid = lay_out(part, room, paged.vocab_size)
            paged.extend(packed(laid, BLOCK_SIZE, room.tokens), logits=False)
    caches = [cache.clone() for layer in pool.kv("target") for cache in layer]
    paged.close()
    return caches


@pytest.mark.parametrize("cut", [0, 2, 7])
def test_a_bucket_writes_what_the_exact_shape_writes(cut):
    exact, bucket = written(ChunkShape.exact, cut), written(ChunkShape.bucket, cut)
    for a, b in zip(exact, bucket, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, atol=1e-5, rtol=1e-5)
        slots = (~a.isnan().any(-1).any(-1)).sum()
        assert slots == sum(map(len, TEXTS)), "padding wrote somewhere"


def test_buckets_hold_their_chunks_and_are_few():
    pool = KVPool(400, BLOCK_SIZE)
    shapes = set()
    for length in range(1, 600):
        seq = Sequence([1] * length, params(), limit=length + 1)
        seq.table = pool.new_table()
        seq.table.grow(length)
        for rows in (1, 3):
            part = [Chunk(seq, 0, length)] * rows
            need, room = ChunkShape.exact(part), ChunkShape.bucket(part)
            assert room.tokens >= need.tokens and room.rows >= rows and room.blocks >= need.blocks
            assert room.tokens < max(17, 2 * need.tokens) and (need.tokens <= 128 or room.tokens <= 1.5 * need.tokens)
            shapes.add(room)
        seq.table.release()
    assert len(shapes) < 60


def test_padding_is_no_token_of_any_sequence():
    pool = KVPool(NUM_BLOCKS, BLOCK_SIZE)
    part = chunks(pool, 0)[:2]
    tokens, table = lay_out(part, ChunkShape(tokens=24, rows=4, blocks=8), VOCAB)
    assert tokens[2].tolist() == [0] * 17 + [1] * 3 + [-1] * 4
    assert tokens[0, 17:].tolist() == [7, 0, 9, 0, 0, 0, 0]
    assert table[:, -2].tolist() == [17, 3, 0, 0] and table[:, -1].tolist() == [17, 20, 20, 20]
    assert table[0, :6].tolist() == part[0].seq.table.blocks and table[2, :8].tolist() == [-1] * 8
