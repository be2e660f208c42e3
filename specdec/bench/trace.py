"""What one run of a batch left behind: when tokens arrived, what became of the drafts, how long each step took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Trace:
    """One request. arrivals: (seconds on the clock, tokens) of each round; rounds: (drafts verified, accepted)."""

    prompt_len: int
    submitted_s: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds from submission to the first token."""
        return self.arrivals[0][0] - self.submitted_s

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """(seconds since the round before, tokens) of every round but the first."""
        times = [t for t, _ in self.arrivals]
        return [(b - a, n) for a, b, (_, n) in zip(times, times[1:], self.arrivals[1:], strict=False)]

    @property
    def seconds_per_token(self) -> float | None:
        """Mean over the tokens after the first round; None if there are none."""
        tokens = sum(n for _, n in self.gaps)
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / tokens if tokens else None


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of the engine. rows: that ran in the round it read; prompt: whether it carries any work on a prompt.

    behind: whether the round that it read stood behind such work; prompt_tokens: that it extended.
    """

    seconds: float
    rows: int
    emitted: int
    prompt: bool
    behind: bool = False
    prompt_tokens: int = 0


@dataclass(slots=True)
class Run:
    """One batch, once. seconds: from the first submission to the last token; peak_bytes: of device memory (or RSS).

    captures: CUDA graphs captured while it ran: such a run is not warm.
    """

    traces: list[Trace]
    steps: list[StepTime]
    seconds: float
    peak_bytes: int
    captures: int = 0

    @property
    def emitted(self) -> int:
        return sum(len(trace.token_ids) for trace in self.traces)

    @property
    def decode(self) -> tuple[float, float]:
        """(tokens, seconds) of the steps in which no prompt was extended."""
        steps = [s for s in self.steps if not s.prompt]
        return sum(s.emitted for s in steps), sum(s.seconds for s in steps)

    @property
    def whole(self) -> tuple[float, float]:
        """(tokens, seconds) of everything."""
        return self.emitted, self.seconds

    @property
    def full_rounds(self) -> list[float]:
        """Seconds of the rounds in which every row of the batch ran, prompts apart."""
        return [s.seconds for s in self.steps if not s.prompt and s.rows == len(self.traces)]
