"""Groups of rows that run their rounds together, each with times, and so a policy and a plan, of its own. Host only."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.logprobs import width
from specdec.policy import Plan, Policy
from specdec.round import RoundShape
from specdec.sequence import Sequence


@dataclass(eq=False)
class Group:
    """policy: None where k is fixed. plan: of the next round; wanted: drafts that the last round read would have had.

    seqs: whose rows run together, `rows` their numbers and `members` the same as a set; none of them is ever changed in
    place, so that a round in flight keeps what it was launched with. fixed: drafts of rows whose number is not the policy's
    to decide; free: the others; drafts: of each row in the next round, at most; nothing where a row is not named. told: the
    same in the order of `seqs`, as the device has it; empty where that isn't known.
    """

    policy: Policy | None = None
    plan: Plan = field(default_factory=Plan)
    wanted: int = 0
    seqs: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    members: frozenset[Sequence] = frozenset()
    fixed: dict[Sequence, int] = field(default_factory=dict)
    free: list[Sequence] = field(default_factory=list)
    drafts: dict[Sequence, int] = field(default_factory=dict)
    told: list[int] = field(default_factory=list)
    _shapes: dict[tuple[int, int | None], RoundShape] = field(default_factory=dict)

    def hold(self, seqs: list[Sequence], fixed: dict[Sequence, int]) -> None:
        """These run together from now on. Each holds a row; those of `fixed` draft so much, whatever the policy says."""
        self.fixed, self.free = {seq: k for seq, k in fixed.items() if k}, [seq for seq in seqs if seq not in fixed]
        self.drafts = self.fixed | self.plan.drafts
        self.seqs, self.rows, self.members = seqs, [seq.row for seq in seqs if seq.row is not None], frozenset(seqs)
        self._shapes, self.told = {}, []

    def shape(self, draft_steps: int, tokens: int | None) -> RoundShape:
        """Of a round of these rows, with all that they want of one."""
        key = draft_steps, tokens
        if key not in self._shapes:
            params = [seq.params for seq in self.seqs]
            self._shapes[key] = RoundShape(
                draft_steps,
                tokens,
                noise=any(p.noise for p in params),
                filters=any(p.filters for p in params),
                adjusted=any(p.adjusted for p in params),
                processed=any(seq.processors for seq in self.seqs),
                logprobs=width(p.logprobs for p in params if not p.processed_logprobs),
                processed_logprobs=width(p.logprobs for p in params if p.processed_logprobs),
            )
        return self._shapes[key]
