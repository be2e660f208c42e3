"""One sample being decoded: its tokens, its parameters, where it stands. Host only."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from torch import Tensor

from specdec.acceptance import Acceptance, RowOutcome, accepted_per_round
from specdec.kvpool import BlockTable
from specdec.logprobs import TokenLogprobs, read
from specdec.sampling import SamplingParams, check_bans, sample_seed

_ids = itertools.count()


class Status(Enum):
    """waiting: no blocks. extending: its prompt is being extended in chunks. running: it takes part in rounds."""

    WAITING = "waiting"
    EXTENDING = "extending"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class RequestStats:
    """Counts of one sample, defined in docs/metrics.md. accepted_per_round and places are filled at its end."""

    rounds: int = 0
    num_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    accepted_per_round: dict[int, int] = field(default_factory=dict)
    places: Acceptance = field(default_factory=Acceptance)
    submitted_s: float = field(default_factory=time.perf_counter)
    first_round_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, 1.0 for plain decoding; 0.0 before the first round."""
        return self.num_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0.0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.submitted_s

    @property
    def decode_s(self) -> float:
        """Seconds from the first to the last emitted token."""
        if self.first_token_s is None or self.last_token_s is None:
            return 0.0
        return self.last_token_s - self.first_token_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first round, which the prompt's time ends with; 0.0 for a single round."""
        return (self.num_tokens - self.first_round_tokens) / self.decode_s if self.decode_s else 0.0

    @property
    def wasted(self) -> int:
        """Drafts that were verified and not emitted."""
        return self.drafted - self.accepted

    def count(self, outcome: RowOutcome, now: float) -> None:
        """Add one round, of which at least one token was kept. now: when it was read."""
        kept, drafted, accepted, _ = outcome
        if self.first_token_s is None:
            self.first_token_s, self.first_round_tokens = now, kept
        self.last_token_s = now
        self.rounds += 1
        self.num_tokens += kept
        self.drafted += drafted
        self.accepted += accepted

    def end(self, outcomes: Counter[RowOutcome]) -> None:
        """Fill in what is not counted round by round. outcomes: of all rounds."""
        self.accepted_per_round, self.places = dict(accepted_per_round(outcomes)), Acceptance.of(outcomes)


class Sequence:
    """Prompt and emitted tokens of one sample; `len(seq)` is l. The newest token never has KV.

    target_len, drafter_len: positions with KV in each model, at most l - 1 (the device may be ahead by one round).
    limit: the most tokens the sequence may reach. parent: the sample whose prompt KV it may fork.
    outcomes: what rounds brought, and how often; places are counted from it at the end, which takes longer than a round may.
    logprobs: of the output, where they are asked for; scores: `kernels.logprobs` of the prompt's tokens but the first, in
    pieces that have reached the host once a round of the sequence has. processors: logits processors, those of its
    grammar among them; failures: what they raised, by the position that was to be drawn.
    Raises ValueError for more bans than a row has room for.
    """

    def __init__(
        self, prompt: list[int], params: SamplingParams, *, limit: int, index: int = 0, eos: tuple[int, ...] = ()
    ):
        assert params.seed is not None, "resolve the parameters first"
        self.id = next(_ids)
        self.token_ids = list(prompt)
        self.prompt_len = len(prompt)
        self.params = params
        self.limit = limit
        self.index = index
        self.eos = () if params.ignore_eos else eos
        self.seed = sample_seed(params.seed, index)
        self.parent: Sequence | None = None
        self.status = Status.WAITING
        self.cancelled = False
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.table: BlockTable | None = None
        self.row: int | None = None
        self.target_len = 0
        self.drafter_len = 0
        self.keys: list[bytes] = []
        self.num_published = self.num_complete = 0
        self.stats = RequestStats()
        self.outcomes = Counter[RowOutcome]()
        self.logprobs: list[TokenLogprobs] = []
        self.scores: list[Tensor] = []
        self.processors = params.logits_processors
        self.failures: dict[int, Exception] = {}
        check_bans(len(self.bans))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end the sequence, the model's own first."""
        return tuple(dict.fromkeys((*self.eos, *self.params.stop_token_ids)))

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of the prompt are asked for and not all there: then its KV can't come from a cache."""
        known = sum(map(len, self.scores))
        return self.params.prompt_logprobs is not None and known < self.prompt_len - 1

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Of each token of the prompt, None for the first; None where they are not asked for, or not all there."""
        if self.params.prompt_logprobs is None or self.unscored or not self.stats.rounds:
            return None
        values = [row for piece in self.scores for row in piece.tolist()]
        return [None, *read(values, self.token_ids[1 : self.prompt_len], self.params.prompt_logprobs)]

    @property
    def bans(self) -> list[tuple[tuple[int, ...], int]]:
        """(token ids, end): the last of them may not follow the others at positions below end."""
        words = [tuple(map(int, word)) for word in self.params.bad_words or () if len(word) > 1]
        ends = self.prompt_len + (self.params.min_tokens or 0)
        first = [((token,), ends) for token in self.stop_ids if ends > self.prompt_len]
        return first + [(word, self.limit) for word in words]

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        if self.status is not Status.FINISHED:
            self.status, self.finish_reason, self.error = Status.FINISHED, reason, error
            self.stats.end(self.outcomes)
