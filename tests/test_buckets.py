"""Which graph runs a round: one that holds it, the smallest, and few of them."""

import random
from dataclasses import replace

import pytest

from specdec.buckets import Buckets, rounded_up, row_bucket
from specdec.round import RoundShape

PLAIN = RoundShape(0, None, noise=False, filters=False)


def plain(rows):
    return replace(PLAIN, tokens=rows)


def drafting(rows, drafts, steps=8):
    return replace(PLAIN, draft_steps=steps, tokens=rows + drafts)


def capturing(buckets, rows, shape, **kwargs):
    """What runs the round; captured at once, which takes no time, if it was not."""
    chosen = buckets.choose(rows, shape, **kwargs)
    if chosen not in buckets._captured:
        buckets.add(chosen)
    return chosen


def test_the_first_round_gets_a_bucket_of_its_own():
    assert Buckets().choose(5, plain(5)) == (8, plain(8))
    assert Buckets().choose(5, drafting(5, 7)) == (8, drafting(8, 16))
    assert Buckets().choose(3, drafting(3, 30, steps=10)) == (4, drafting(4, 40, steps=10)), "no more than the steps"
    assert Buckets().choose(300, plain(300)) == (320, plain(320))
    assert Buckets().choose(5, PLAIN) == (8, plain(8))


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


def test_another_one_is_borne_until_it_has_cost_what_a_capture_does():
    """In a graph of 96 rows three rows lose 23/24 of each round, and 48 of them half."""
    buckets = Buckets()
    buckets.add((96, plain(96)), seconds=2.0)
    seen = [capturing(buckets, 3, plain(3), seconds=0.5) for _ in range(7)]
    assert seen == [(96, plain(96))] * 4 + [(4, plain(4))] * 3
    assert buckets.choose(2, plain(2), 0.5) == (4, plain(4)), "which serves others too"
    assert all(buckets.choose(48, plain(48), 0.5) == (96, plain(96)) for _ in range(3)), "the mean of both is 1"
    assert buckets.choose(48, plain(48), 0.5) == (96, plain(96)) and buckets.choose(48, plain(48), 0.5) == (
        48,
        plain(48),
    )


def test_what_is_no_wider_than_its_own_is_borne_for_good():
    """25 drafts of 20 rows: 72 tokens in a bucket of their own, and 64 in one that is there."""
    buckets = Buckets()
    buckets.add((32, drafting(32, 32)), seconds=0.1)
    assert all(buckets.choose(20, drafting(20, 25), 1.0) == (32, drafting(32, 32)) for _ in range(9))


def test_a_drafter_that_needs_no_room_takes_what_there_is():
    """For as long as it loses less by that than a capture takes; where there is no room at all it gets some."""
    buckets = Buckets()
    buckets.add((8, plain(8)), seconds=1.0)
    assert buckets.choose(8, drafting(8, 30), 0.5, elastic=True) == (8, drafting(8, 32)), "of another kind"
    buckets.add((8, drafting(8, 8)), seconds=1.0)
    seen = [capturing(buckets, 8, drafting(8, 30), seconds=0.5, elastic=True) for _ in range(5)]
    assert seen == [(8, drafting(8, 8))] * 3 + [(8, drafting(8, 32))] * 2, "3/5 of a round each"
    assert buckets.choose(8, drafting(8, 60), 0.5) == (8, drafting(8, 64)), "not elastic"


def test_few_rows_get_all_the_room_that_is_free():
    assert Buckets().choose(1, drafting(1, 1, steps=15), elastic=True) == (1, drafting(1, 15, steps=15))
    assert Buckets().choose(3, drafting(3, 2), elastic=True) == (4, drafting(4, 12))
    assert Buckets().choose(3, drafting(3, 0), elastic=True) == (4, drafting(4, 0)), "without drafts it needs none"
    assert Buckets().choose(1, drafting(1, 1, steps=15)) == (1, drafting(1, 1, steps=15))


def test_eagerly_each_gets_its_own():
    buckets = Buckets()
    buckets.add((96, plain(96)), seconds=2.0)
    with buckets.eagerly():
        assert buckets.choose(3, plain(3)) == (4, plain(4))
    assert buckets.choose(3, plain(3)) == (96, plain(96))


def test_a_batch_that_drains_captures_next_to_nothing():
    """Look-up drafts of any number, 96 rows down to 1, a few rounds at each: what is chosen always holds the rows."""
    draw, buckets, captured = random.Random(0), Buckets(), 0
    for rows in range(96, 0, -1):
        for _ in range(4):
            drafts = draw.choice([0, 1, rows // 2, 2 * rows, 8 * rows])
            bucket, shape = buckets.choose(rows, drafting(rows, drafts), 0.001, elastic=True)
            captured += (bucket, shape) not in buckets._captured
            if (bucket, shape) not in buckets._captured:
                buckets.add((bucket, shape), seconds=2.0)
            assert bucket >= rows and shape.draft_steps == 8
    assert captured <= 3, "one with room for drafts, and one or two before it"


def test_buckets_round_up():
    assert [rounded_up(n) for n in (0, 1, 2, 3, 4, 5, 9)] == [0, 1, 2, 4, 4, 8, 16]
    assert [row_bucket(n) for n in (1, 2, 3, 5, 17, 97, 256, 257)] == [1, 2, 4, 8, 24, 128, 256, 320]
