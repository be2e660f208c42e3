"""The engine: arranges scheduler, models and rounds, one step at a time. One thread calls it (see worker.py)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from specdec.acceptance import RowOutcome
from specdec.advice import DEBUG, advise, told
from specdec.buckets import rounded_up
from specdec.draft import Drafter, LookupDrafter, ModelDrafter
from specdec.flight import CatchUp, Flight, Post, reading, reported
from specdec.graphs import RoundGraphs
from specdec.group import Group
from specdec.kvpool import KVPool
from specdec.listener import Listener
from specdec.model import PagedModel
from specdec.policy import Candidates, Plan, Policy
from specdec.processing import Processing
from specdec.prompts import PromptForward
from specdec.round import Counts, DrafterFailed, Round, RoundResult, RoundShape
from specdec.rows import Rows
from specdec.scheduler import Chunk, Scheduler
from specdec.sequence import Sequence, Status
from specdec.stats import EngineStats
from specdec.stopwatch import Laps, Stopwatch, timed
from specdec.uploads import sent
from specdec.verify import Verifier


def _current(device: torch.device) -> AbstractContextManager:
    """Within it streams and events are those of `device`, whichever GPU the caller's thread is on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """k: drafts per row and round at most. prompt_budget: prompt tokens between two rounds.

    adaptive: how many of the k drafts are made follows their cost and survival (`Policy`); else always k.
    lag: rounds that the host reads behind the launch; 1 hides its work behind the device's, 0 is for a CPU.
    graphs: replay rounds as CUDA graphs.
    """

    k: int = 4
    prompt_budget: int = 512
    lag: int = 1
    graphs: bool = False
    adaptive: bool = False


class Engine:
    """Target, drafter and verifier over one pool. `submit` sequences, call `step` until it is idle.

    drafter: proposes tokens, or None. draft_model: the drafter's paged model where it keeps KV in the pool.
    """

    def __init__(
        self,
        target: PagedModel,
        verifier: Verifier,
        rows: Rows,
        drafter: Drafter | None = None,
        config: EngineConfig = EngineConfig(),
        salt: bytes = b"",
    ):
        self.target, self.drafter, self.rows, self.config = target, drafter, rows, config
        self.draft_model = drafter.model if isinstance(drafter, ModelDrafter) else None
        self.round = Round(rows, target, drafter, verifier)
        self.scheduler = Scheduler(
            target.pool,
            rows,
            prompt_budget=config.prompt_budget,
            has_drafter=self.draft_model is not None,
            salt=salt,
        )
        self.round.processing = Processing(self.scheduler.placed)
        self.graphs = RoundGraphs(self.round) if config.graphs else None
        self.prompts = PromptForward(target, rows.device, graphs=config.graphs)
        self.drafter_prompts: PromptForward | None = None
        if self.draft_model:
            self.drafter_prompts = PromptForward(self.draft_model, rows.device, graphs=config.graphs)
        self.stats = EngineStats()
        self.flights: list[Flight] = []
        self.listeners: dict[Sequence, Listener] = {}
        self.drafter_error: Exception | None = None
        # Where the host keeps ahead of the device, rows that need it inside a round form rounds of their own.
        self.whole, self.split = self.groups = (Group(), Group())
        self._apart = config.graphs or config.lag > 0
        if drafter and config.adaptive:
            for group in self.groups:
                group.policy = Policy(config.k, stepped=not isinstance(drafter, LookupDrafter))
            if isinstance(drafter, ModelDrafter):
                # It lacks two tokens after drafts that were all right, and one more for each plain round that follows.
                drafter.window = max(drafter.window, config.lag + 2)
        self._grouped: tuple[int, bool] | None = None  # what the groups' rows were made from
        self._catch_ups: list[CatchUp] = []
        self._cancelled: deque[Sequence] = deque()
        self._post = Post()
        self._laps = Laps()
        self._steps = 0

    @property
    def pool(self) -> KVPool:
        return self.target.pool

    @property
    def _prompt_forwards(self) -> list[PromptForward]:
        return [self.prompts, *([self.drafter_prompts] if self.drafter_prompts else [])]

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self.flights

    def submit(self, seq: Sequence, listener: Listener | None = None) -> None:
        """Queue `seq`. Raises ValueError as `Scheduler.check_fits` does."""
        self.scheduler.check_fits(seq)
        if listener:
            self.listeners[seq] = listener
        self.scheduler.submit(seq)
        if seq.cancelled:
            self._cancelled.append(seq)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, and graphs that hold weights which have been replaced since."""
        self.pool.allocator.reset_prefix_cache()
        replaced = [model.refresh() for model in (self.target, self.draft_model) if model]
        if any(replaced):
            self.graphs = RoundGraphs(self.round) if self.graphs else None
            for prompts in self._prompt_forwards:
                prompts.forget()

    def cancel(self, seq: Sequence) -> None:
        """End `seq` at the next step; what a round in flight emits for it is dropped. Safe from any thread."""
        seq.cancelled = True
        self._cancelled.append(seq)

    def step(self) -> None:
        """One round of every group: make room, take in prompts, launch; then read what was launched before."""
        with self.stats.timed("step"), _current(self.rows.device):
            self._step()

    def _step(self) -> None:
        self._drop_cancelled()
        if self.drafter is None or self.scheduler.waiting or self.scheduler.extending:
            self.scheduler.reserve(self._slots())  # running rows first, then those that join
        self.take_in()
        self._join()
        if self.drafter is not None:
            self._plan()
            self.scheduler.reserve(self._slots())
        with self.stats.timed("launch"):
            self._launch()
        with self.stats.timed("prompts"):
            for prompts in self._prompt_forwards:
                prompts.capture()
        lag = self.config.lag if self.scheduler.running else 0
        while self.flights and self.flights[0].step <= self._steps - lag:
            self._read(self.flights.pop(0))
        if DEBUG:
            self.scheduler.check()

    def take_in(self) -> None:
        """Give waiting sequences rows and run the next chunks of prompts."""
        self._admit()
        with self.stats.timed("prompts"):
            self._extend_prompts()

    def run(self) -> None:
        """Step until nothing is left to do."""
        while not self.idle:
            self.step()

    # -- before a round

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            seq = self._cancelled.popleft()
            if seq.row is not None or seq in self.scheduler.waiting:
                self._finish(seq, "cancelled")

    def _slots(self) -> dict[Sequence, int]:
        """Slots that each running row needs for its next round, at most: unread rounds may have emitted all they can."""
        unread = [(f.members, f.shape.draft_steps + 1) for f in self.flights]
        slots: dict[Sequence, int] = {}
        for group in self._parts():
            drafts, members = group.drafts, group.members
            all_rows = sum([most for those, most in unread if those is members])
            slots |= {seq: len(seq.token_ids) + all_rows + drafts.get(seq, 0) for seq in group.seqs}
            for those, most in unread:
                for seq in () if those is members else those & members:
                    slots[seq] += most
        return slots

    def _fixed_k(self, seq: Sequence) -> int:
        """Drafts of `seq` in every round, at most, where no policy decides."""
        if self.drafter is None:
            return 0
        return self.config.k if seq.params.k is None else seq.params.k

    def _fixed(self, seq: Sequence) -> bool:
        """Whether how much to draft for `seq` is not a policy's to decide."""
        return self.whole.policy is None or seq.params.k is not None

    def _group(self, seq: Sequence) -> Group:
        drafts_on_host = self.drafter and seq.params.k != 0 and not getattr(self.drafter, "capturable", False)
        return self.split if self._apart and (seq.processors or drafts_on_host) else self.whole

    def _parts(self) -> list[Group]:
        """The groups with running rows; first those that leave the device time for others."""
        made_from = self.scheduler.changes, self.drafter is None
        if self._grouped != made_from:
            parts: dict[Group, list[Sequence]] = {group: [] for group in self.groups}
            for seq in self.scheduler.running:
                parts[self._group(seq)].append(seq)
            for group, seqs in parts.items():
                group.hold(seqs, {seq: self._fixed_k(seq) for seq in seqs if self._fixed(seq)})
            self._grouped = made_from
        return [group for group in (self.split, self.whole) if group.seqs]

    def _admit(self) -> None:
        copies = self.scheduler.admit(seq for f in self.flights for seq in f.seqs)
        self.rows.flush()
        self.pool.copy_blocks(copies)

    def _extend_prompts(self) -> None:
        self.rows.flush()
        extending = self.scheduler.extending
        if not extending:
            return
        chunks = self.scheduler.target_chunks()
        scored = [c for c in chunks if c.seq.unscored]
        for part in ([c for c in chunks if not c.seq.unscored], scored):
            if self._extend(self.prompts, part, scored=part is scored):
                self.stats.prompt_tokens += sum(c.end - c.start for c in part)
                for c in part:
                    c.seq.target_len = c.end
        extending = self.scheduler.extending  # without those that failed
        resting = {group for group in self.groups if group.policy and group.policy.resting}
        self.scheduler.resting.update(s for s in extending if self._group(s) in resting and not self._fixed(s))
        self._extend_drafter([seq for seq in extending if not self.scheduler.rests(seq)])

    def _extend_drafter(self, seqs: list[Sequence], group: Group | None = None, batch: int = 0) -> None:
        """Run the drafter over what it lacks of `seqs`: prompts, or some of a group's `batch` running rows."""
        chunks = self.scheduler.drafter_chunks(seqs) if self.drafter_prompts else []
        if self.drafter_prompts is None or not chunks:
            return
        took = Stopwatch(self.rows.device) if self.whole.policy else None
        if not self._extend(self.drafter_prompts, chunks):
            return
        for c in chunks:
            c.seq.drafter_len = c.end
            if c.seq.status is Status.RUNNING:
                self.rows.set_drafter_len(c.seq.row, c.end)
        chosen = [c for c in chunks if c.seq.status is Status.RUNNING and not self._fixed(c.seq)]
        tokens, of_running = (sum(c.end - c.start for c in part) for part in (chunks, chosen))
        self.stats.drafter_tokens += tokens
        if took:
            self._catch_ups.append(CatchUp(group, tokens, of_running, batch, took.stop()))

    def _extend(self, prompts: PromptForward, chunks: list[Chunk], scored: bool = False) -> bool:
        """Run the chunks, ragged and packed, with the head if `scored`. A failure ends their sequences and no other."""
        if not chunks:
            return False
        try:
            if scored:
                for chunk, piece in zip(chunks, prompts.score(chunks, self.rows.vocab_size), strict=True):
                    chunk.seq.scores = [*(chunk.seq.scores if chunk.start else []), piece]
            else:
                prompts.run(chunks)
        except Exception as error:
            for chunk in chunks:
                self._finish(chunk.seq, "error", error)
            return False
        return True

    def _join(self) -> None:
        for seq in self.scheduler.extending:
            self.scheduler.publish(seq)
            if self.scheduler.ready(seq):
                self._start(seq)

    def _start(self, seq: Sequence) -> None:
        try:
            self.scheduler.join(seq, self._fixed_k(seq) if self._fixed(seq) else 0)
        except Exception as error:  # no memory for the tables of its logits
            self._finish(seq, "error", error)

    def _plan(self) -> None:
        """Decide how much each row drafts, and catch up the drafter where it is behind and wanted."""
        self.rows.flush()
        for group in self._parts():
            self._plan_group(group)
            k = [group.drafts.get(seq, 0) for seq in group.seqs]
            if k != group.told:
                self.rows.set_k(group.rows, k)
                group.told = k

    def _plan_group(self, group: Group) -> None:
        behind = {seq: lacks for seq in group.seqs if (lacks := self._behind(seq))} if self.draft_model else {}
        if group.policy:
            unread = set().union(*(f.drafts for f in self.flights)).intersection(group.free)
            rows = Candidates(group.free, {seq: behind[seq] for seq in group.free if seq in behind}, unread)
            risk = sum(f.plan.risk for f in self.flights if f.group is group)
            group.plan = group.policy.plan(rows, len(group.seqs), risk)
        group.drafts = group.fixed | group.plan.drafts
        if behind:
            self._catch_up(group, behind)

    def _catch_up(self, group: Group, behind: dict[Sequence, int]) -> None:
        """Run the drafter over what it lacks of rows that are to draft; those that are late all the same do not."""
        self._extend_drafter([seq for seq in behind if seq in group.drafts], group, len(group.seqs))
        late = {seq for seq in behind if seq in group.plan.drafts and self._behind(seq)}
        if late:
            drafts = {seq: k for seq, k in group.plan.drafts.items() if seq not in late}
            group.plan = replace(group.plan, drafts=drafts) if drafts else Plan()
            group.drafts = group.fixed | drafts

    def _behind(self, seq: Sequence) -> int:
        """Tokens that the drafter must run before it can draft for `seq` again, or 0.

        Rounds in flight without draft steps leave it a token further behind each; the others keep it warm.
        """
        if not isinstance(self.drafter, ModelDrafter):
            return 0
        known = lacks = len(seq) - seq.drafter_len
        for f in self.flights:
            if seq in f.members:
                warm = f.shape.draft_steps and lacks <= self.drafter.window
                lacks = 1 + bool(f.drafts.get(seq)) if warm else lacks + 1
        return known - 1 if lacks > self.drafter.window else 0

    # -- the round, and what it brought

    def _launch(self) -> None:
        """Launch the groups' rounds; where the host would wait inside one, the next one is launched before."""
        self._steps += 1
        ahead = bool(self.flights)
        self.rows.flush()
        rounds = [self._round(group) for group in self._parts()]
        while rounds:
            rounds = [launch for launch in rounds if next(launch, "over") != "over"]
        launched = [f for f in self.flights if f.step == self._steps]
        seconds = self._laps.lap(self.stats.aside)
        for flight in launched if ahead and all(f.fair for f in launched) else ():
            flight.host_s = seconds / len(launched)

    def _round(self, group: Group) -> Generator[None, None, None]:
        """Launch a round of the group, with a pause wherever the host is about to wait for the device."""
        seqs, members, plan, drafts, shape = group.seqs, group.members, group.plan, group.drafts, self._shape(group)
        captures = self.graphs.captures if self.graphs else 0
        took = Stopwatch(self.rows.device) if group.policy else None
        try:
            result = yield from self._stages(group.rows, shape, took)
        except Exception as error:
            for seq in seqs:
                self._finish(seq, "error", error)
            return
        if took:
            took.stop()
        fair = self.graphs is None or self.graphs.captures == captures
        self.stats.rounds += 1
        values, scores, event = self._post.send(result)
        self.flights.append(
            Flight(self._steps, group, values, event, seqs, members, shape, plan, drafts, took, fair, scores)
        )

    def _stages(self, rows: list[int], shape: RoundShape, took: Stopwatch | None) -> Generator[None, None, RoundResult]:
        if not self.round.needs_host(shape) and self.graphs:
            return self.graphs.run(rows, shape)
        device = self.rows.device
        index = sent(torch.tensor(rows), device)
        try:
            if not self.round.needs_host(shape):
                return self.round.run(index, shape)
            return (yield from timed(self.round.stages(index, shape), took))
        except DrafterFailed as failure:
            # Speculation can't change the output, so a broken drafter costs speed only: go on without it.
            self.drafter_error, self.drafter, self.round.drafter = failure.error, None, None
            self.scheduler.has_drafter = False  # or rows would wait for KV that nobody writes
            for group in self.groups:
                group.policy, group.plan = None, Plan()
            advise(f"the drafter failed, decoding goes on without it: {told(failure.error)}")
            return self.round.run(index, replace(shape, draft_steps=0, tokens=shape.tokens and len(rows)))

    def _shape(self, group: Group) -> RoundShape:
        drafts, rows, tokens = group.drafts.values(), len(group.seqs), None
        k = max([*drafts, group.plan.steps if group.free else 0])
        if self.rows.device.type != "cpu":
            # A look-up drafter may want far less than k for every row: what it wanted last time sizes the bucket.
            wanted = sum(drafts) if self.draft_model else min(sum(drafts), group.wanted)
            tokens = rows * (1 + max(rounded_up(-(-wanted // rows)), group.plan.bucket))
        return group.shape(k, tokens)

    def _read(self, flight: Flight) -> None:
        """The one read of a round: what it emitted, and the counts beside it."""
        if flight.event:
            with self.stats.timed("wait"):
                flight.event.synchronize()
        n = len(Counts._fields)
        values = flight.values[: len(flight.seqs)].numpy()  # a captured round has padding rows behind them
        counts = list(map(Counts._make, values[:, :n].tolist()))
        if flight.shape.draft_steps:
            flight.group.wanted = sum([c.num_wanted for c in counts])
        if flight.group.policy:
            self._learn(flight.group.policy, flight, counts)
        outcomes, ends, now = Counter[RowOutcome](), [], time.perf_counter()
        for b, (seq, count, emitted) in enumerate(zip(flight.seqs, counts, values[:, n:].tolist(), strict=True)):
            if seq.status is Status.FINISHED or seq.cancelled:
                self.stats.dropped += count.num_emitted
                continue
            token_ids = emitted[: count.num_emitted]
            if flight.logprobs is not None and seq.params.logprobs is not None:
                seq.logprobs += reported(flight, b, token_ids)
            if not count.ran:
                self.stats.stalls += 1
                continue
            outcome, end = self._take(seq, count, token_ids, now)
            outcomes[outcome] += 1
            if end:
                ends.append((seq, *end))
        self._post.take_back(flight)
        self.stats.count(outcomes)
        for seq, reason, error in ends:  # whoever waits for one finds it counted
            self._finish(seq, reason, error)

    def _learn(self, policy: Policy, flight: Flight, counts: list[Counts]) -> None:
        """Tell the group's policy what the round brought and took, and both what catching up took before it."""
        while self._catch_ups and self._catch_ups[0].took.done:
            done = self._catch_ups.pop(0)
            seconds = done.took.read()
            for group in self.groups:
                running = done.running if group is done.group else 0
                group.policy.caught_up(done.tokens, running, done.batch, seconds)
        policy.observe(reading(flight, counts))
        rows = len(flight.seqs)
        least = policy.least(rows)
        # Look-up knows one cost of a draft: the whole rounds', where there are any.
        beside = flight.group is self.split and any(f.group is self.whole for f in self.flights)
        if isinstance(self.drafter, LookupDrafter) and least is not None and not beside:
            self.drafter.learn(rows, least)

    def _take(
        self, seq: Sequence, counts: Counts, token_ids: list[int], now: float
    ) -> tuple[RowOutcome, tuple[str, Exception | None] | None]:
        """Append what a round emitted for `seq`; with what became of it, why it ends, where it does."""
        if self.draft_model and seq.status is Status.RUNNING:
            # The read is older than a catch-up that the host enqueued since, so the larger count holds.
            seq.drafter_len = max(seq.drafter_len, counts.drafter_len)
        kept, stopped, error = self._tell(seq, token_ids)
        known, stood = seq.token_ids, counts.num_accepted
        known += token_ids[:kept]
        length = len(known)
        if seq.logprobs:
            del seq.logprobs[length - seq.prompt_len :]
        cut = kept <= stood
        outcome = (kept, counts.num_drafts, kept if cut else stood, cut)
        seq.outcomes[outcome] += 1
        seq.stats.count(outcome, now)
        if error:
            return outcome, ("error", error)
        if counts.failed:
            what = FloatingPointError(f"the logits of position {length} hold NaN, or no token at all")
            return outcome, ("error", seq.failures.get(length, what))
        if stopped or length >= seq.limit:
            return outcome, ("stop" if stopped else "length", None)
        if seq.status is Status.RUNNING:
            self.scheduler.publish(seq)
        return outcome, None

    def _tell(self, seq: Sequence, token_ids: list[int]) -> tuple[int, bool, Exception | None]:
        """How many of the tokens stay, and whether the sequence ends there: at a stop id, or as the listener says."""
        kept, stopped = len(token_ids), False
        if stop_ids := seq.stop_ids:
            for i, token in enumerate(token_ids):
                if token in stop_ids:
                    kept, stopped = i + 1, True
                    break
        listener = self.listeners.get(seq)
        if listener is None or not token_ids:
            return kept, stopped, None
        try:
            told, ends = listener.emitted(seq, token_ids[:kept])
        except Exception as error:
            return kept, True, error
        return min(kept, told), stopped or ends, None

    def _finish(self, seq: Sequence, reason: str, error: BaseException | None = None) -> None:
        for group in self.groups:
            if group.policy:
                group.policy.forget(seq)
        self.scheduler.release(seq, publish=error is None)  # KV of a failed round must not be found by others
        seq.finish(reason, error)
        self.stats.finished[reason] += 1
        self.stats.cached_tokens += seq.stats.cached_tokens
        if seq.stats.time_to_first_token_s is not None:
            self.stats.first_tokens += 1
            self.stats.first_token_s += seq.stats.time_to_first_token_s
        listener = self.listeners.pop(seq, None)
        if listener:
            try:
                listener.finished(seq)
            except Exception as failure:
                advise(f"a listener failed at the end of its sequence: {told(failure)}")
