"""What a drafter may return."""

import pytest
import torch

from specdec.draft import Draft, Drafter, LookupDrafter, as_draft


def test_a_pair_becomes_a_draft():
    draft = as_draft((torch.zeros(2, 3).long(), torch.ones(2).long()), 2, 3)
    assert isinstance(draft, Draft)
    assert (draft.scores, draft.written) == (None, None)
    assert as_draft(([[1, 2]], [2]), 1, 2).token_ids.tolist() == [[1, 2]]
    assert as_draft(draft, 2, 3) is draft


@pytest.mark.parametrize(
    ("proposal", "error", "message"),
    [
        (None, TypeError, "propose: expected a Draft or .token_ids, counts., got NoneType"),
        (torch.zeros(2, 3), TypeError, "propose: expected a Draft or .token_ids, counts., got Tensor"),
        ((torch.zeros(2, 3),), TypeError, "propose: expected a Draft or .token_ids, counts., got tuple"),
        ((torch.zeros(2, 4), torch.zeros(2)), ValueError, "propose: expected token_ids of shape .2, 3., got .2, 4."),
        ((torch.zeros(6), torch.zeros(2)), ValueError, "propose: expected token_ids of shape .2, 3., got .6,."),
        ((torch.zeros(2, 3), torch.zeros(2, 1)), ValueError, "propose: expected counts of shape .2,., got .2, 1."),
        (Draft(torch.zeros(2, 3), torch.zeros(3)), ValueError, "propose: expected counts of shape .2,., got .3,."),
    ],
)
def test_what_is_no_draft_is_named(proposal, error, message):
    with pytest.raises(error, match=message):
        as_draft(proposal, 2, 3)


def test_anything_with_propose_is_a_drafter():
    class Mine:
        def propose(self, rows, k):
            return None

    assert isinstance(Mine(), Drafter)
    assert isinstance(LookupDrafter(), Drafter)
    assert not isinstance(object(), Drafter)
