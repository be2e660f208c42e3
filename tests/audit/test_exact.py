"""Level 0 on the code that serves: the distribution of what is emitted is the target's, to rounding."""

import pytest

from specdec.audit import exact
from specdec.verify import block, rejection


@pytest.mark.parametrize("method", [rejection, block])
def test_every_target_drafter_and_policy(method):
    cases = exact.cases(method, method.__name__)
    assert len({case.name for case in cases}) == len(cases) > 100
    errors = {case.name: case.error() for case in cases}
    assert max(errors.values()) < exact.TOLERANCE, max(errors, key=errors.get)


def test_block_verification_accepts_no_less():
    """Its accepted length is the longest of all that are valid (Sun et al., theorem 2)."""
    target, draft = exact.Model(3, 23), exact.Model(3, 24)

    def accepted(method):
        case = exact.Case("", target, exact.Drafter(draft, draft), exact.policies(3)["always k"], method, 3)
        chains, chances, lengths = case._drafts(())
        return float((chances * method(case._chain((), chains, lengths)).survival.sum(1)).sum())

    assert accepted(block) > accepted(rejection) + 0.01


def test_coupled_sampling_on_tables_of_noise():
    assert exact.coupled(seeds=3).status == "pass"
