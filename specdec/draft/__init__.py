"""Drafters: what proposes tokens."""

from specdec.draft.base import Draft, Drafter, DraftRows, as_draft
from specdec.draft.lookup import LookupDrafter
from specdec.draft.model import ModelDrafter
from specdec.draft.vocabulary import check_vocabulary

__all__ = ["Draft", "DraftRows", "Drafter", "LookupDrafter", "ModelDrafter", "as_draft", "check_vocabulary"]
