"""Counts by place, and the text that Prometheus reads."""

import threading

import pytest
from support import Request, engine, params, run

from specdec.acceptance import Acceptance
from specdec.metrics import exposition


def test_rates_by_place():
    places = Acceptance()
    for drafted, accepted, cut in ((3, 3, False), (3, 1, False), (0, 0, False), (2, 0, False), (3, 1, True)):
        places.count(drafted, accepted, cut)
    assert places.drafted == [4, 4, 3]
    assert places.tested == [4, 2, 1]  # the last round ended at its first draft: nothing is known of the second
    assert places.accepted == [3, 1, 1]
    assert places.unconditional == [3 / 4, 1 / 4, 1 / 3]
    assert places.conditional == [3 / 4, 1 / 2, 1.0]
    assert Acceptance().conditional == []


def test_places_can_be_read_while_rounds_are_counted():
    """It ends when the counting does, whichever thread runs when."""
    places = Acceptance()
    outcomes = [(drafted, accepted, False) for drafted in range(1, 120) for accepted in range(drafted + 1)]
    counting = threading.Thread(target=lambda: [places.count(*outcome) for outcome in outcomes])
    counting.start()
    while counting.is_alive():
        assert len(places.conditional) <= 119 and len(places.unconditional) <= 119
    counting.join()
    assert places.drafted[0] == len(outcomes)


def parsed(text):
    """{name with labels: value}; every sample has its HELP and TYPE before it."""
    values, known = {}, set()
    for line in text.splitlines():
        if line.startswith("#"):
            known.add(line.split()[2])
            continue
        name, value = line.rsplit(" ", 1)
        family = name.split("{")[0]
        assert {family, family.removesuffix("_sum").removesuffix("_count")} & known
        values[name.removeprefix("specdec_")] = float(value)
    return values


@pytest.mark.parametrize("drafter", ["none", "right", "near"])
def test_the_engine_counts_what_its_requests_do(drafter):
    e = engine(drafter=drafter, k=3, rows=2)
    empty = parsed(exposition(e))
    assert empty["emitted_tokens_total"] == 0 and empty["rows"] == 2
    done = run(e, [Request([1 + i, 2, 3], 9, params(0.8 * i, seed=i), eos=(5, 40)) for i in range(3)])
    each, values = [r.seq.stats for r in done], parsed(exposition(e))
    assert values["emitted_tokens_total"] == sum(len(r.seq.output_ids) for r in done)
    assert values["drafted_tokens_total"] == sum(s.drafted for s in each) == sum(e.stats.places.drafted)
    assert values["accepted_tokens_total"] == sum(s.accepted for s in each) == sum(e.stats.places.accepted)
    assert values["wasted_tokens_total"] == sum(s.wasted for s in each)
    assert values["row_rounds_total"] == sum(s.rounds for s in each)
    for i, (drafted, tested, accepted) in enumerate(
        zip(e.stats.places.drafted, e.stats.places.tested, e.stats.places.accepted, strict=True)
    ):
        assert drafted >= tested >= accepted
        assert values[f'place_tested_total{{place="{i + 1}"}}'] == tested
        assert tested == sum(s.places.tested[i] for s in each if len(s.places.tested) > i)
    if drafter == "right":
        assert set(e.stats.places.conditional) == {1.0}
    ends = {reason: values.get(f'requests_total{{reason="{reason}"}}', 0) for reason in ("stop", "length")}
    assert sum(ends.values()) == 3 and values["time_to_first_token_seconds_count"] == 3
    seconds = [values[f'seconds_total{{part="{part}"}}'] for part in ("prompts", "launch", "wait", "step")]
    assert 0 < sum(seconds[:3]) <= seconds[3]
    assert (values["running"], values["waiting"], values["free_blocks"]) == (0, 0, values["blocks"])
