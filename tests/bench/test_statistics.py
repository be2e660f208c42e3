"""Statistics on fixed inputs, each figure worked out by hand."""

import math
from collections import Counter

import pytest

from specdec.bench.statistics import (
    FEW,
    Acceptance,
    Change,
    Distribution,
    Spread,
    expected_length,
    quantiles,
    rate,
    speedup,
    t95,
)


def test_quantiles_are_the_smallest_value_that_covers_the_share() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert quantiles(values, (0, 0.2, 0.21, 0.5, 0.9, 1)) == [1, 1, 2, 3, 5, 5]
    assert quantiles(list(range(1, 101)), (0.5, 0.9, 0.99)) == [50, 90, 99]
    assert quantiles([7.0], (0, 0.5, 1)) == [7, 7, 7]
    assert quantiles([1.0, 10.0], (0.5, 0.9, 0.95), [9, 1]) == [1, 1, 10]


def test_quantiles_refuse_nothing_and_shares_outside() -> None:
    with pytest.raises(ValueError, match="values: expected at least one"):
        quantiles([], (0.5,))
    with pytest.raises(ValueError, match="at: expected shares from 0 to 1"):
        quantiles([1.0], (1.5,))


def test_spread_has_the_median_and_the_extremes() -> None:
    spread = Spread.of([10.0, 8.0, 11.0])
    assert (spread.median, spread.low, spread.high, spread.values) == (10, 8, 11, [10, 8, 11])
    assert spread.relative == pytest.approx(0.3) and Spread.of([4.0]).relative == 0
    with pytest.raises(ValueError, match="values"):
        Spread.of([])


def test_distribution_counts_by_weight() -> None:
    d = Distribution.of([0.01, 0.04], [3, 1])
    assert d is not None and (d.count, d.p50, d.p90, d.p99) == (4, 0.01, 0.04, 0.04)
    assert d.mean == pytest.approx(0.0175) and d.curve[0] == 0.01 and d.curve[-1] == 0.04
    assert Distribution.of([]) is None and Distribution.of([1.0], [0]) is None


def test_acceptance_by_position_conditional_and_not() -> None:
    # Ten rounds of 3 drafts: 4 accept none, 2 one, 1 two, 3 all; two rounds of 1 draft, one accepted; one of none.
    rounds = Counter({(3, 0): 4, (3, 1): 2, (3, 2): 1, (3, 3): 3, (1, 1): 1, (1, 0): 1, (0, 0): 1})
    a = Acceptance.of(rounds, emitted=13 + 14)
    assert (a.rounds, a.drafted, a.accepted, a.wasted) == (13, 32, 14, 18)
    assert a.length == pytest.approx(27 / 13)
    assert a.histogram == [6, 3, 1, 3]
    assert a.unconditional == pytest.approx([7 / 12, 4 / 10, 3 / 10])
    assert a.conditional == pytest.approx([7 / 12, 4 / 6, 3 / 4]) and a.reached == [12, 6, 4]
    # Survival is the product of the conditional shares where every round drafts as deep.
    deep = Acceptance.of(Counter({(3, 0): 4, (3, 1): 2, (3, 2): 1, (3, 3): 3}), emitted=23)
    assert deep.unconditional[2] == pytest.approx(math.prod(deep.conditional))


def test_acceptance_of_plain_decoding_and_of_nothing() -> None:
    plain = Acceptance.of(Counter({(0, 0): 7}), emitted=7)
    assert plain == Acceptance(1.0, 7, 0, 0, 0, [7], [], [])
    assert Acceptance.of(Counter(), 0).length == 0


def test_a_position_that_nobody_reaches_is_no_division_by_zero() -> None:
    a = Acceptance.of(Counter({(2, 0): 5}), emitted=5)
    assert a.conditional == [0.0, 0.0] and a.unconditional == [0.0, 0.0]


def test_rate_weighs_by_time() -> None:
    assert rate([(10, 1.0), (10, 4.0)]) == 4 and rate([(3, 0.0)]) == 0 and rate([]) == 0


def test_speedup_pairs_runs_and_resamples_prompts() -> None:
    base = [[(10, 1.0), (10, 1.0), (10, 1.0)]] * 2
    same = speedup(base, base)
    assert (same.value, same.low, same.high, same.over) == (1, 1, 1, "prompts")
    ours = [[(10, 0.5), (10, 1.0), (10, 0.25)]] * 2
    s = speedup(ours, base)
    assert s.value == pytest.approx(3 / 1.75) and 1.0 <= s.low < s.value < s.high <= 4.0
    assert speedup(ours, base) == s, "the bootstrap has a fixed seed"


def test_speedup_of_one_batch_varies_over_runs() -> None:
    s = speedup([[(10, 1.0)], [(10, 0.5)], [(10, 0.4)]], [[(10, 1.0)]] * 3)
    assert (s.value, s.low, s.high, s.over) == (2, 1, 2.5, "runs")


def test_positions_of_few_rounds_are_not_sure() -> None:
    a = Acceptance.of(Counter({(3, 0): 4, (3, 1): FEW, (3, 3): FEW - 1}), emitted=99)
    assert a.reached == [2 * FEW + 3, 2 * FEW - 1, FEW - 1] and a.sure == 2 and len(a.conditional) == 3
    assert Acceptance.of(Counter({(1, 1): FEW}), emitted=40).sure == 1
    assert Acceptance.of(Counter({(0, 0): 7}), emitted=7).sure == 0


def test_change_knows_its_noise() -> None:
    assert Change.of([10, 10, 10], [20, 20, 20]).relative == pytest.approx(1)
    assert Change.of([10, 10, 10], [20, 20, 20]).verdict == "more"
    noisy = Change.of([9, 10, 11], [9.5, 10.5, 11.2])
    assert noisy.verdict == "within noise" and noisy.noise is not None and noisy.noise > 0.1
    clear = Change.of([100, 101, 99], [80, 81, 79])
    assert clear.verdict == "less" and clear.relative == pytest.approx(-0.2, abs=0.001)
    assert Change.of([10], [20, 21]).verdict == "unknown noise"
    # Two samples of two: se = sqrt(2) * |ln 1.1| / 2 over both, 2 degrees of freedom.
    two = Change.of([1.0, 1.1], [1.0, 1.1])
    assert two.noise == pytest.approx(4.303 * math.log(1.1) / math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize(
    ("freedom", "point"), [(0.5, 12.706), (1, 12.706), (2.9, 4.303), (20, 2.086), (30, 2.086), (1e6, 1.96)]
)
def test_t95(freedom: float, point: float) -> None:
    assert t95(freedom) == point


def test_expected_length_is_the_geometric_sum() -> None:
    assert expected_length(0.8, 3) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert expected_length(1.0, 4) == 5 and expected_length(0.0, 4) == 1
