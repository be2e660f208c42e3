"""Groups of rows that run their rounds together, each with times, and so a policy and a plan, of its own. Host only."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.policy import Plan, Policy


@dataclass(eq=False, slots=True)
class Group:
    """policy: None where k is fixed. plan: of the next round; wanted: drafts that the last round read would have had."""

    policy: Policy | None = None
    plan: Plan = field(default_factory=Plan)
    wanted: int = 0
