"""How much to draft: what rounds cost, how far drafts survive, and the policy that decides by both."""

from specdec.policy.budget import ladder
from specdec.policy.costs import Costs
from specdec.policy.policy import Candidates, Outcome, Plan, Policy, Reading
from specdec.policy.survival import Survival, curve

__all__ = ["Candidates", "Costs", "Outcome", "Plan", "Policy", "Reading", "Survival", "curve", "ladder"]
