"""Which graph runs a round: one that holds it, the smallest, and few of them."""

import random
from dataclasses import replace

import pytest

from specdec.buckets import PATIENCE, Buckets, rounded_up, row_bucket
from specdec.round import RoundShape

PLAIN = RoundShape(0, None, noise=False, filters=False)


def plain(rows):
    return replace(PLAIN, tokens=rows)


def drafting(rows, drafts, steps=8):
    return replace(PLAIN, draft_steps=steps, tokens=rows + drafts)


def capturing(buckets, rows, shape):
    """What runs the round; captured at once if it was not."""
    chosen = buckets.choose(rows, shape)
    if chosen not in buckets._captured:
        buckets.add(chosen)
    return chosen


def test_the_first_round_gets_a_bucket_of_its_own():
    assert Buckets().choose(5, plain(5)) == (8, plain(8))
    assert Buckets().choose(5, drafting(5, 7)) == (8, drafting(8, 16))
    assert Buckets().choose(3, drafting(3, 30, steps=10)) == (4, drafting(4, 40, steps=10)), "no more than the steps"
    assert Buckets().choose(300, plain(300)) == (320, plain(320))


def test_the_smallest_that_holds_the_round_runs_it():
    buckets = Buckets()
    for bucket, drafts in ((96, 96), (24, 24), (24, 96), (16, 16), (16, 64)):
        buckets.add((bucket, drafting(bucket, drafts)))
    assert buckets.choose(16, drafting(16, 10)) == (16, drafting(16, 16))
    assert buckets.choose(16, drafting(16, 20)) == (24, drafting(24, 24)), (
        "its padding rows leave their tokens to drafts"
    )
    assert buckets.choose(13, drafting(13, 40)) == (16, drafting(16, 64))
    assert buckets.choose(20, drafting(20, 60)) == (24, drafting(24, 96))


@pytest.mark.parametrize("other", ["draft_steps", "noise", "filters", "adjusted", "processed", "logprobs"])
def test_a_graph_of_another_kind_holds_nothing(other):
    buckets, shape = Buckets(), drafting(4, 4, steps=2)
    buckets.add((4, replace(shape, **{other: 5 if other in ("draft_steps", "logprobs") else True})))
    assert buckets.choose(4, shape) == (4, shape)


def test_far_too_wide_is_borne_for_a_while():
    buckets = Buckets()
    buckets.add((96, plain(96)))
    assert all(buckets.choose(48, plain(48)) == (96, plain(96)) for _ in range(9 * PATIENCE)), "twice is not far"
    seen = [capturing(buckets, 3, plain(3)) for _ in range(PATIENCE + 2)]
    assert seen == [(96, plain(96))] * PATIENCE + [(4, plain(4))] * 2
    assert buckets.choose(2, plain(2)) == (4, plain(4)), "which serves others too"


def test_a_batch_that_drains_captures_next_to_nothing():
    """Look-up drafts of any number, 96 rows down to 1, a few rounds at each: what is chosen always holds the round."""
    draw, buckets, captured = random.Random(0), Buckets(), 0
    for rows in range(96, 0, -1):
        for _ in range(4):
            drafts = draw.choice([0, 1, rows // 2, 2 * rows, 8 * rows])
            bucket, shape = buckets.choose(rows, drafting(rows, drafts))
            captured += (bucket, shape) not in buckets._captured
            if (bucket, shape) not in buckets._captured:
                buckets.add((bucket, shape))
            assert bucket >= rows and shape.tokens - rows >= drafts and shape.draft_steps == 8
    assert captured <= 12, "at most six rounds at each of 13 row buckets and five numbers of drafts would be 65"


def test_buckets_round_up():
    assert [rounded_up(n) for n in (0, 1, 2, 3, 4, 5, 9)] == [0, 1, 2, 4, 4, 8, 16]
    assert [row_bucket(n) for n in (1, 2, 3, 5, 17, 97, 256, 257)] == [1, 2, 4, 8, 24, 128, 256, 320]
