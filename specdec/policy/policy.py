"""How much to draft: the draft steps and the token bucket with the most expected tokens per second. Host only.

Two limits hold whatever the estimates say. Time: an allowance, in plain rounds, that losing rounds and catching up
spend, winning ones fill for a while and time restores slowly; without it rounds are plain. Rounds: a drafter, or a row,
that has never been right is left alone after three tries and asked again after 64 rounds, 128, 256 and so on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specdec.policy.budget import LEAST_RATE, UNKNOWN, Budget, budgets, ladder, shapes
from specdec.policy.costs import Costs
from specdec.policy.survival import Survival, curve

ALLOWANCE, EARNED, MOST_SAVED, SPOILT = 2.5, 0.004, 8.0, 0.03
"""Plain rounds: at the start, restored by a round, saved at most; the share of what was saved beyond the start that a
round takes away again. 2.5 + 256 * 0.004 is 1.4 % of 256 rounds, and what a good drafter had saved is soon gone."""
TRIES, PAUSE, LONGEST_PAUSE = 3, 64, 512
SHORT_PAUSE, LONGEST_SHORT_PAUSE = 8, 64
"""Of a drafter that paces itself: its misses cost a few percent of a round, and the allowance bounds what they add up to.
Weak matches come first in a text that is copied later; three of them say nothing about it (docs/results.md).
"""
WORTH, SWITCH = 1.02, 1.03
"""What drafting must promise beyond plain decoding, and a new shape beyond the last one: estimates are noisy, and on a
GPU a shape that is new must be captured."""
PROBED_ROWS = 4
UNKNOWN_CATCH_UP = 2.0
"""Taken for what catching up takes, in plain rounds, before it was measured."""
_LOOKED_AT = 64
"""Rows that a drafter that paces itself has planned for, and learnt from, a round: to look at a hundred takes the host half as
long as all the rest that it does for a round, which may then be longer than the device's of a small model. With fewer, rows
that turn bad go on drafting for longer."""
_TRIED = 4
"""Drafts that a row may have from a drafter that paces itself before it has been right for it."""
_HORIZON = 32
"""Rounds within which catching a drafter up must pay."""
_SURPRISE, _MOVED = 0.3, 0.1
_REMEASURE = 256
"""Drafted rounds in a row after which plain decoding is measured anew: contexts grow."""
_POOLED_DECAY, _ROW_DECAY = 0.97, 0.95


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows that may draft, by their keys. behind: tokens that the drafter must run first, of rows where that is so;
    unread: rows that draft in a round in flight. No object for each row: there may be a hundred, in every round.
    """

    keys: Sequence[Hashable]
    behind: Mapping[Any, int] = field(default_factory=dict)
    unread: Collection[Any] = frozenset()

    @property
    def ready(self) -> list[Hashable]:
        """Those that are not behind."""
        return [key for key in self.keys if key not in self.behind]

    @property
    def late(self) -> list[Hashable]:
        """The others, least behind first."""
        return sorted(self.behind, key=self.behind.__getitem__)


@dataclass(frozen=True, slots=True)
class Plan:
    """draft steps of the round; drafts of each row (absent: none); catch_up: rows among them to be caught up first.

    risk: plain rounds that are lost if no draft is right. bucket: drafts per row that the round has room for, 0 where
    what the rows want decides that. fresh: whether it was made by looking at the rows, which is when they are learnt from;
    else an earlier one holds.
    """

    steps: int = 0
    drafts: dict[Any, int] = field(default_factory=dict)
    catch_up: frozenset[Hashable] = frozenset()
    risk: float = 0.0
    bucket: int = 0
    fresh: bool = True


class Outcome(NamedTuple):
    """What a round brought a row: drafts verified, the accepted ones among them."""

    key: Hashable
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A round that was read. places: tokens of its bucket beyond one for each of `batch` rows; outcomes: of rows that had
    drafts, none where the plan was not fresh; gained: tokens that drafts brought; seconds: None if they are no fair sample;
    mixed: rows whose k is fixed drafted too, so that its time is not this policy's doing, while what became of their drafts
    says as much about the drafter as that of others.
    """

    batch: int
    steps: int
    places: int
    outcomes: list[Outcome]
    gained: int = 0
    seconds: float | None = None
    mixed: bool = False


class Trial:
    """Whether to ask a drafter, or ask it for one row: not before round `until`.

    tries: misses that suspend what has never hit, None for no such limit; pause, longest: rounds, of which each is a token
    of a row that does not draft. now: the number of the round.
    """

    def __init__(self, tries: int | None = TRIES, pause: int = PAUSE, longest: int = LONGEST_PAUSE) -> None:
        self.tries, self.shortest, self.longest = tries, pause, longest
        self.misses = self.until = 0
        self.pause = pause
        self.proven = False

    def open(self, now: int) -> bool:
        return now >= self.until

    @property
    def certain(self) -> bool:
        """Whether rounds may draft without knowing yet how the last one went."""
        return self.proven and self.pause == self.shortest

    def note(self, hit: bool, now: int) -> None:
        """What an answer was; the last of the tries of what has never hit suspends it."""
        self.proven, self.misses = self.proven or hit, 0 if hit else self.misses + 1
        if not self.proven and self.tries is not None and self.misses >= self.tries:
            self.suspend(now)

    def suspend(self, now: int) -> None:
        self.until, self.pause = now + self.pause, min(2 * self.pause, self.longest)

    def resume(self) -> None:
        self.until, self.pause = 0, self.shortest


@dataclass(slots=True)
class _Row:
    trial: Trial
    survival: Survival


class Policy:
    """Plans rounds of one drafter, at most `k` drafts per row, and learns from what they bring.

    stepped: drafts cost a forward each (a draft model), so their number is searched for. Otherwise the drafter chooses
    itself how much to propose (look-up), which costs next to nothing, and only the cut-off is left to decide.
    """

    def __init__(self, k: int, *, stepped: bool, costs: Costs | None = None):
        self.k, self.stepped, self.costs = k, stepped, costs or Costs()
        self.allowance = ALLOWANCE
        self._places = k if stepped else 1  # a drafter that paces itself is judged by its first drafts alone
        self.pooled, self.trial = Survival(_POOLED_DECAY, self._places), Trial()
        self._rows: dict[Hashable, _Row] = {}
        self._now = 0  # rounds observed
        self._last: tuple[int, int] = (0, 0)
        self._drafted_on_end, self._turn = 0, False
        self._found: tuple[Budget, dict[Hashable, int]] | None = None
        self._held, self._batch, self._hopes, self._allowed = 0, 0, 1.0, 0.0
        self._keys: Sequence[Hashable] = ()
        self._again = Plan()  # what holds for a few rounds, of a drafter that paces itself

    @property
    def resting(self) -> bool:
        """Whether the drafter is left alone for now, so that new rows need not fill its KV.

        Once it may be asked again they do: along with a prompt that is cheap, and without it catching up may never be.
        """
        return self.stepped and not self.trial.open(self._now)

    def shapes(self, batch: int) -> list[tuple[int, int]]:
        """(draft steps, drafts per row) that plans for rounds of `batch` rows may have; see `budget.shapes`."""
        return shapes(batch, self.k, self.costs)

    def forget(self, key: Hashable) -> None:
        self._rows.pop(key, None)

    # -- planning

    def plan(self, rows: Candidates, batch: int, pledged: float = 0.0) -> Plan:
        """The next round of `batch` rows, of which `rows` may draft. pledged: the risk of rounds that are not read."""
        if not rows.keys or self._measures(batch):
            return Plan()
        budget = self.allowance - pledged
        if not self.stepped:
            return self._let(rows, batch, budget)
        may = self._may(rows)
        found = self._current(may, batch, budget) if self.trial.proven else None
        if found is None:
            if not rows.unread:
                self._last = (0, 0)
            return self._probe(rows, batch, budget)
        late = self._worth_catching_up(rows.late, rows, batch, budget, found[0].value - 1)
        if len(late) < len(rows.behind):
            found = self._search([key for key in may if key not in rows.behind or key in late], batch, budget)
        if found is None:
            return Plan()
        self.trial.resume()
        chosen, drafts = found
        self._last = (chosen.steps, chosen.bucket)
        return Plan(chosen.steps, drafts, late & drafts.keys(), chosen.extra, chosen.bucket)

    def _measures(self, batch: int) -> bool:
        """Whether this round is plain for its time: every other one until that is known, then one now and then.

        Not several in a row, or rows would fall further behind than a draft step reaches.
        """
        self._turn = not self._turn
        if self.costs.plain(batch) is None:
            return self._turn
        if self._drafted_on_end < _REMEASURE:
            return False
        self._drafted_on_end = 0
        return True

    def _let(self, rows: Candidates, batch: int, budget: float) -> Plan:
        """For a drafter that paces itself: every row that is not cut off may draft what the allowance can bear.

        In a large batch what was found holds for a few rounds, for the rows that are certain.
        """
        self._held -= 1
        if self._held >= 0 and self._again.risk <= budget and (batch, rows.keys) == (self._batch, self._keys):
            return self._again
        may = self._may(rows)
        if may and self.costs.extra(batch, 0, batch) is None:  # a first look at what drafts cost
            return Plan(self.k, dict.fromkeys(may[:PROBED_ROWS], 1), risk=UNKNOWN) if budget >= UNKNOWN else Plan()
        drafts, risk = self._borne(may, batch, budget)
        certain = {key: k for key, k in drafts.items() if self._rows[key].trial.certain}
        self._again = Plan(self.k, certain, risk=risk, fresh=False) if certain else Plan()
        self._held = batch // _LOOKED_AT if 2 * len(certain) >= len(drafts) else 0
        self._batch, self._keys = batch, rows.keys
        return Plan(self.k, drafts, risk=risk) if drafts else Plan()

    def _borne(self, may: list[Hashable], batch: int, budget: float) -> tuple[dict[Hashable, int], float]:
        """As many drafts for each of the rows as the allowance can bear, and what they risk."""
        for k in reversed(ladder(self.k)) if may else ():
            extra = self.costs.extra(batch, 0, k * len(may)) or 0.0
            if extra <= budget:
                tried, known = min(k, _TRIED), self._rows
                return {key: k if known[key].trial.certain else tried for key in may}, min(extra, UNKNOWN)
        return {}, 0.0

    def _may(self, rows: Candidates) -> list[Hashable]:
        """Those that are not cut off, nor wait for their first answer."""
        now, known, keys, unread = self._now, self._rows, rows.keys, rows.unread
        for key in keys:
            if key not in known:
                self._row(key)
        return [
            key for key in keys if (trial := known[key].trial).until <= now and (trial.certain or key not in unread)
        ]

    def _probe(self, rows: Candidates, batch: int, budget: float) -> Plan:
        """One draft for every row that is in step, or for a few that are caught up: to learn how good the drafter is."""
        if not self.trial.open(self._now) or rows.unread:
            return Plan()
        extra = self.costs.extra(batch, 1, batch)
        risk = UNKNOWN if extra is None else extra
        chosen, late = rows.ready, frozenset[Hashable]()
        if not chosen:
            late = self._worth_catching_up(rows.late[:PROBED_ROWS], rows, batch, budget - risk, math.inf)
            chosen = list(late)
        if not chosen or risk > budget:
            return Plan()
        if self.trial.proven and extra is not None:
            self.trial.suspend(self._now)
        return Plan(1, dict.fromkeys(chosen, 1), late, risk, bucket=1)

    def _current(self, may: list[Hashable], batch: int, allowed: float) -> tuple[Budget, dict[Hashable, int]] | None:
        """The budget with the most tokens per second for the rows that `may` draft, and their drafts; None for plain decoding.

        In a large batch it is looked for once in a few rounds: looking takes as long as a round of a small model.
        """
        hopes = sum(curve(self.pooled.rates(self.k)), 1.0)
        self._held -= 1
        moved = may != self._keys or abs(hopes / self._hopes - 1) > _MOVED
        allows_other = allowed > self._allowed + _MOVED if self._found is None else allowed < self._found[0].extra
        if self._held < 0 or moved or allows_other:
            self._found = self._search(may, batch, allowed)
            known = self._found is None or (self._found[0].steps, self._found[0].bucket) == self._last
            self._held = batch // 8 if known else 0
            self._keys, self._hopes, self._allowed = may, hopes, allowed
        return self._found

    def _search(self, may: list[Hashable], batch: int, allowed: float) -> tuple[Budget, dict[Hashable, int]] | None:
        rates = self.pooled.rates(self.k)
        curves = [curve(self._rows[key].survival.rates(self.k, rates)) for key in may]
        found = [b for b in budgets(curves, batch, self.k, self.costs) if b.extra <= allowed and b.value > WORTH]
        if not found:
            return None
        best = max(found, key=lambda b: (b.value, -b.steps, -b.bucket))
        last = next((b for b in found if (b.steps, b.bucket) == self._last), None)
        chosen = last if last and best.value < SWITCH * last.value else best
        return chosen, {key: count for key, count in zip(may, chosen.counts, strict=True) if count}

    def _worth_catching_up(
        self, late: list[Hashable], rows: Candidates, batch: int, budget: float, gain: float
    ) -> frozenset[Hashable]:
        """Those of the `late` rows, in this order, whose drafter may be caught up within the allowance."""
        chosen: list[Hashable] = []
        tokens = 0
        for key in late:
            tokens += rows.behind[key]
            cost = self._catching_up(tokens, batch)
            if cost > budget or cost > gain * _HORIZON:
                break
            chosen.append(key)
        return frozenset(chosen)

    def _catching_up(self, tokens: int, batch: int) -> float:
        """What it takes, in plain rounds."""
        seconds, plain = self.costs.catch_up(tokens), self.costs.plain(batch)
        if plain is None:
            return math.inf
        return UNKNOWN_CATCH_UP if seconds is None else seconds / plain

    def _row(self, key: Hashable) -> _Row:
        if key not in self._rows:
            trial = Trial() if self.stepped else Trial(None, SHORT_PAUSE, LONGEST_SHORT_PAUSE)
            self._rows[key] = _Row(trial, Survival(_ROW_DECAY, self._places))
        return self._rows[key]

    # -- learning

    def observe(self, reading: Reading) -> None:
        """Learn from a round."""
        steps = reading.steps if self.stepped else 0
        if reading.seconds is not None:
            self.costs.add(reading.batch, steps, reading.places, reading.seconds)
        believed = self.pooled.rates(1)[0]
        least = LEAST_RATE if self.stepped else max(LEAST_RATE, self.least(reading.batch) or 0.0)
        self._now += 1
        for outcome in reading.outcomes:
            self._learn(outcome, believed, least)
        if reading.outcomes:
            self.pooled.fade()
            if self.stepped:
                self._judge(sum(o.accepted > 0 for o in reading.outcomes) / len(reading.outcomes), believed)
        drafted = steps + reading.places > 0
        self._drafted_on_end = self._drafted_on_end + 1 if drafted else 0
        if reading.steps and drafted and not reading.mixed:
            self._charge(reading, steps)
        saved = self.allowance - ALLOWANCE
        self.allowance += min(EARNED, -saved) if saved < 0 else -SPOILT * saved

    def caught_up(self, tokens: int, running: int, batch: int, seconds: float) -> None:
        """Learn what it took the drafter to run `tokens` tokens; those of running rows are spent, prompts are not.

        At most what was expected when it was chosen: a forward that meets a kernel for the first time takes seconds, and
        tells nothing of the next one.
        """
        plain = self.costs.plain(batch) if running else None
        if plain:
            self.allowance -= min(seconds / plain, self._catching_up(tokens, batch)) * running / tokens
        self.costs.add_catch_up(tokens, seconds)

    def least(self, batch: int) -> float | None:
        """The survival from which on a draft of one of `batch` rows pays for its token; None while that is unknown."""
        extra = self.costs.extra(batch, 0, batch)
        return None if extra is None else min(1.0, extra)

    def _learn(self, outcome: Outcome, believed: float, least: float) -> None:
        key, drafted, accepted = outcome
        row = self._rows.get(key) or self._row(key)
        trial, survival = row.trial, row.survival
        self.pooled.add(drafted, accepted)
        survival.add(drafted, accepted)
        survival.fade()
        trial.note(accepted > 0, self._now)
        if survival.rates(1, [believed])[0] < least:
            if trial.open(self._now):
                trial.suspend(self._now)
        elif accepted:
            trial.resume()

    def _judge(self, rate: float, believed: float) -> None:
        """How a round's first drafts did. A probe that did far better than was believed is worth another one at once."""
        if not self.trial.proven:
            self.trial.note(rate > 0, self._now)
        elif not self.trial.open(self._now) and rate > believed + _SURPRISE:
            self.trial.resume()

    def _charge(self, reading: Reading, steps: int) -> None:
        """Charge the round to the allowance, or credit it: tokens beyond plain decoding's, less the time beyond it."""
        extra = self.costs.extra(reading.batch, steps, reading.places)
        gained = reading.gained / reading.batch
        self.allowance = min(MOST_SAVED, self.allowance + gained - (UNKNOWN if extra is None else extra))
