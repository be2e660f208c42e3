"""The audit catches what it is for: each mistake that shipped somewhere turns its level red, and no other that runs here.

Every figure is deterministic: models, seeds and schedules are fixed.
"""

from functools import partial

import faults
import pytest
import torch

from specdec.audit import exact
from specdec.audit.distribution import TABLES, tables
from specdec.audit.laboratory import Settings, audit
from specdec.audit.report import FAIL
from specdec.audit.sampler import checks as sampler
from specdec.verify import block, rejection

CPU = torch.device("cpu")
ONE_DRAFT, MANY_DRAFTS, FILTERED = TABLES


def levels(*numbers):
    return audit(Settings(levels=numbers, verifier="coupled")).checks


def through(verifier, *each):
    return [tables(verifier, table, CPU) for table in each]


def red(checks):
    return {c.level for c in checks if c.status == FAIL}


FAULTS = {
    "shared noise": (faults.shared_noise, partial(through, "rejection", ONE_DRAFT), {4}),
    "shared noise, block": (faults.shared_noise, partial(through, "block", ONE_DRAFT), {4}),
    "position-keyed noise, block": (faults.position_keyed_noise, partial(through, "block", MANY_DRAFTS), {4}),
    "greedy drafts by ratio": (faults.ratio_test_on_greedy_drafts, partial(through, "rejection", ONE_DRAFT), {4}),
    "dropped drafts": (faults.dropped_drafts, partial(through, "rejection", ONE_DRAFT), {4}),
    "accept all, by ratio": (faults.accept_all_by_ratio, partial(through, "rejection", FILTERED), {4}),
    "accept all, by equality": (faults.accept_all_by_equality, partial(levels, 2, 3), {2, 3}),
    "q before filters": (faults.q_before_filters, partial(through, "rejection", FILTERED), {4}),
    "penalties ignore drafts": (faults.penalties_ignore_drafts, partial(levels, 2, 3), {3}),
    "starved tail": (faults.starved_tail, partial(sampler, CPU), {1}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_turns_its_level_red(name, monkeypatch):
    plant, look, expected = FAULTS[name]
    plant(monkeypatch)
    assert red(look()) == expected


def test_token_by_token_verification_survives_position_keyed_noise(monkeypatch):
    """It never looked at the drafts after the first one that fell."""
    faults.position_keyed_noise(monkeypatch)
    assert not red(through("rejection", MANY_DRAFTS))


@pytest.mark.parametrize("method", [rejection, block])
def test_what_a_whole_engine_needs_thousands_of_tokens_for_is_exact_at_level_0(method):
    """Claimed and drawn q differ, or the policy is unlawful: the total variation is far from rounding."""
    target = exact.Model(3, 11)
    other = exact.Model(3, 12)
    always = exact.policies(2)["always k"]

    def error(drafter, policy=always, rule=method):
        return exact.Case("", target, drafter, policy, rule).error()

    greedy, filtered = (exact.Model(3, 12, partial(exact.top, k=k)) for k in (1, 2))
    assert error(exact.Drafter(other, other)) < exact.TOLERANCE
    assert error(exact.Drafter(greedy, other)) > 0.01
    assert error(exact.Drafter(filtered, other)) > 0.01
    assert error(exact.Drafter(greedy, None)) < exact.TOLERANCE
    assert error(exact.Drafter(other, other), lambda drafts, q: int(float(q[0][drafts[0]]) >= 0.3)) > 0.01

    def generous(chain):
        decision = method(chain)
        decision.survival = chain.judged.double()
        return decision

    assert error(exact.Drafter(other, other), rule=generous) > 0.01
