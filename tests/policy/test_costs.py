"""What rounds cost: estimates for shapes that have not run, at a price that does not grow with those that have."""

import random

from specdec.policy import Costs, costs


def filled(seed=0):
    """Costs of many shapes, each measured a few times, in any order."""
    draw, known = random.Random(seed), Costs()
    shapes = [
        (rows, steps, drafts) for rows in (1, 3, 8, 24, 96) for steps in (0, 2, 4) for drafts in (0, 1, rows, 4 * rows)
    ]
    for rows, steps, drafts in draw.sample(3 * shapes, 3 * len(shapes)):
        known.add(rows, steps, drafts, (1 + steps / 2 + drafts / 100) * draw.uniform(0.9, 1.1))
    return known


def test_a_shape_that_is_asked_for_again_is_not_looked_for_again(monkeypatch):
    """Every round asks several times; looking through all shapes took longer than a round of a small model."""
    known, looked = filled(), []
    asked = [(rows, steps, drafts) for rows in (1, 2, 30, 96) for steps in (0, 3) for drafts in (1, 7, 5 * rows)]
    first = [known.extra(*shape) for shape in asked]
    apart = costs._apart
    monkeypatch.setattr(costs, "_apart", lambda a, b: looked.append(a) or apart(a, b))
    for rows, steps, drafts in ((24, 0, 0), (24, 2, 24), (96, 4, 96)):
        known.add(rows, steps, drafts, 1.0)
    assert [known.extra(*shape) is None for shape in asked] == [value is None for value in first] and not looked


def test_what_is_found_once_is_what_would_be_found_anew():
    """A shape that is new, and a plain round that counts from its second time on, are heeded at once."""
    known, draw = Costs(), random.Random(1)
    for _ in range(300):
        rows, steps = draw.choice([1, 2, 5, 16, 40]), draw.choice([0, 0, 1, 4])
        known.add(rows, steps, draw.choice([0, 1, rows, 3 * rows]), draw.uniform(1, 5))
        asked = draw.choice([1, 3, 17, 64]), draw.choice([0, 2]), draw.choice([0, 1, 2, 9, 64])
        found = known.extra(*asked), known.memory_bound(asked[0], asked[1])
        known._nearest.clear()
        assert found == (known.extra(*asked), known.memory_bound(asked[0], asked[1]))


def test_medians_pass_over_outliers_and_follow_what_changes():
    known = Costs()
    for seconds in (1.0, 1.0, 90.0, 1.0):
        known.add(8, 0, 0, seconds)
    assert known.plain(8) == 1.0
    for _ in range(5):
        known.add(8, 0, 0, 2.0)
    assert known.plain(8) == 2.0
    assert known.plain(9) is None and known.extra(8, 0, 8) is None and known.extra(8, 0, 0) == 0.0
