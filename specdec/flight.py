"""Flights: rounds that are launched and not read yet, and how what they bring gets home."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.group import Group
from specdec.logprobs import TokenLogprobs, columns, read
from specdec.policy import Outcome, Plan, Reading
from specdec.round import Counts, RoundResult, RoundShape
from specdec.sequence import Sequence, Status
from specdec.stopwatch import Stopwatch

_PAUSE = 4
"""What took the host so many times as long as the device was no round's work but a pause: a collection, a slow listener. One
must not be held against drafts for good."""


@dataclass(slots=True)
class Flight:
    """A launched round that is not read yet: its values and log-probabilities on their way, and whose row is whose.

    step: the engine's that launched it; group: its rows', plan: what the policy decided of it; members: the set of `seqs`;
    drafts: what each row may draft, nothing where it is not named.
    took: for the policy, None without one; fair: whether that is what another round of its shape would take. host_s: seconds
    of the host's own work for it, where the device went on with another round meanwhile.
    """

    step: int
    group: Group
    values: Tensor
    event: torch.cuda.Event | None
    seqs: list[Sequence]
    members: frozenset[Sequence]
    shape: RoundShape
    plan: Plan
    drafts: dict[Sequence, int]
    took: Stopwatch | None
    fair: bool
    logprobs: Tensor | None = None
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        """What the round took: the device, or the host where it was the longer one; to be asked for once, and with `took`."""
        assert self.took, "without a policy nobody asks"
        device = self.took.read()
        return max(device, min(self.host_s, _PAUSE * device))


@dataclass(slots=True)
class CatchUp:
    """A forward of the drafter over tokens that it had missed: `running` of them by the policy's choice, for some of the
    group's `batch` running rows. group: None for prompts.
    """

    group: Group | None
    tokens: int
    running: int
    batch: int
    took: Stopwatch


def sent_home(values: Tensor) -> Tensor:
    """`values` on their way to the host: to be read once an event behind this call has come."""
    if not values.is_cuda:
        return values
    home = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return home.copy_(values, non_blocking=True)


def reported(flight: Flight, b: int, token_ids: list[int]) -> list[TokenLogprobs]:
    """The log-probabilities of what row b of a round emitted."""
    params, first = flight.seqs[b].params, columns(flight.shape.logprobs)
    part = slice(first, None) if params.processed_logprobs else slice(0, first)
    return read(flight.logprobs[b, : len(token_ids), part].tolist(), token_ids, params.logprobs)


class Post:
    """Brings what rounds emit to the host, in memory and with events that are used again: to make them takes the host
    about as long as a round of a small model takes it in all.
    """

    def __init__(self) -> None:
        self._memory: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._events: list[torch.cuda.Event] = []

    def send(self, result: RoundResult) -> tuple[Tensor, Tensor | None, torch.cuda.Event | None]:
        """The round's values and log-probabilities in memory that the host can read, after the event."""
        if not result.values.is_cuda:
            return result.values, result.logprobs, None
        values = self._send(result.values)
        scores = None if result.logprobs is None else self._send(result.logprobs)
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record()
        return values, scores, event

    def take_back(self, flight: Flight) -> None:
        """The flight has been read, and nothing of it is looked at any more."""
        if flight.event is None:
            return
        self._events.append(flight.event)
        for memory in (flight.values, flight.logprobs):
            if memory is not None:
                self._memory[memory.shape, memory.dtype].append(memory)

    def _send(self, values: Tensor) -> Tensor:
        free = self._memory[values.shape, values.dtype]
        if not free:
            return sent_home(values)
        return free.pop().copy_(values, non_blocking=True)


def reading(flight: Flight, counts: list[Counts]) -> Reading:
    """What the round tells a policy. counts: its columns, a row each. Rows that asked for no drafts say nothing."""
    rows, tokens, steps = len(flight.seqs), flight.shape.tokens, flight.shape.draft_steps
    drafted = [(seq, c) for seq, c in zip(flight.seqs, counts, strict=True) if c.num_drafts and c.ran]
    told = [(seq, c) for seq, c in drafted if seq.status is not Status.FINISHED and seq.params.k != 0]
    return Reading(
        batch=rows,
        steps=steps,
        places=sum([c.num_drafts for _, c in drafted]) if tokens is None else tokens - rows,
        outcomes=[Outcome(seq, c.num_drafts, c.num_accepted) for seq, c in told] if flight.plan.fresh else [],
        gained=sum([c.num_emitted - 1 for _, c in drafted]),
        seconds=flight.seconds if flight.took and flight.fair else None,
        mixed=len(flight.drafts) > len(flight.plan.drafts),
    )
