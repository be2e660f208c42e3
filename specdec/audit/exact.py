"""Level 0: models of three to six tokens, small enough to sum over everything that can happen.

A round is summed over all drafts and all outcomes of the very function that serves (`specdec.verify`), rounds are strung
together until enough tokens are out, and the distribution of those is compared with the target's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from specdec.audit.report import Check, check
from specdec.distribution import unfiltered
from specdec.kernels import accept, sample
from specdec.verify import Chain, Decision

Tokens = tuple[int, ...]
Method = Callable[[Chain], Decision]
Policy = Callable[[Tokens, list[Tensor]], int]
"""How many of a row's drafts are submitted, from the drafts and the distribution that each was drawn from.

Lawful if it stops at the first draft where a condition on the drafts up to it, or on the distribution of the next, holds.
"""

TOLERANCE = 1e-12


class Model:
    """A distribution over `size` tokens after every prefix: random, sharpened, and changed by `shape`."""

    def __init__(self, size: int, seed: int, shape: Callable[[Tensor], Tensor] = lambda p: p):
        self.size, self.seed, self.shape = size, seed, shape
        self._known: dict[Tokens, Tensor] = {}

    def __call__(self, prefix: Tokens) -> Tensor:
        """[size] fp64."""
        if prefix not in self._known:
            number = self.seed
            for token in prefix:
                number = (number * self.size + token + 1) % (1 << 31)
            generator = torch.Generator().manual_seed(number)
            weights = torch.randn(self.size, generator=generator, dtype=torch.float64)
            self._known[prefix] = self.shape((1.5 * weights).softmax(0))
        return self._known[prefix]


@dataclass(frozen=True)
class Drafter:
    """drawn: what drafts are drawn from. claimed: what the verifier is told, None for point masses."""

    drawn: Callable[[Tokens], Tensor]
    claimed: Callable[[Tokens], Tensor] | None


@dataclass
class Case:
    """A target, a drafter, a policy for k and a method. `error()`: total variation of the first `tokens` tokens."""

    name: str
    target: Model
    drafter: Drafter
    policy: Policy
    method: Method
    k: int = 2
    tokens: int = 3
    _rounds: dict[Tokens, dict[Tokens, float]] = field(default_factory=dict)

    def error(self) -> float:
        emitted, wanted = self.emitted(), self.wanted()
        return sum(abs(emitted[s] - wanted[s]) for s in wanted.keys() | emitted.keys()) / 2

    def wanted(self) -> defaultdict[Tokens, float]:
        """The target's own distribution over `tokens` tokens."""
        out: defaultdict[Tokens, float] = defaultdict(float)
        for tokens in itertools.product(range(self.target.size), repeat=self.tokens):
            chances = [float(self.target(tokens[:i])[token]) for i, token in enumerate(tokens)]
            out[tokens] = float(torch.tensor(chances, dtype=torch.float64).prod())
        return out

    def emitted(self) -> defaultdict[Tokens, float]:
        """What rounds emit, cut at `tokens` tokens."""
        mass: defaultdict[Tokens, float] = defaultdict(float, {(): 1.0})
        for length in range(self.tokens):
            for prefix in [p for p in mass if len(p) == length]:
                here = mass.pop(prefix)
                for tokens, chance in self._round(prefix).items():
                    mass[(prefix + tokens)[: self.tokens]] += here * chance
        return mass

    def _round(self, prefix: Tokens) -> dict[Tokens, float]:
        """The probability of everything that one round may emit after `prefix`."""
        chains, chances, lengths = self._drafts(prefix)
        chain = self._chain(prefix, chains, lengths)
        decision = self.method(chain)
        edge = torch.ones_like(chances)[:, None]
        survival = torch.cat([edge, decision.survival, 0 * edge], 1)
        out: defaultdict[Tokens, float] = defaultdict(float)
        for accepted in range(self.k + 1):
            stands = chances * (survival[:, accepted] - survival[:, accepted + 1])
            weights = chain.residual(torch.full_like(lengths, accepted).minimum(lengths), decision.scale[:, accepted])
            after = stands[:, None] * weights / weights.sum(1, keepdim=True)
            for c in (stands != 0).nonzero()[:, 0].tolist():
                for token in range(self.target.size):
                    out[chains[c][:accepted] + (token,)] += float(after[c, token])
        return out

    def _drafts(self, prefix: Tokens) -> tuple[list[Tokens], Tensor, Tensor]:
        """Every chain of k drafts that can be drawn, its probability, and how many of it are submitted."""
        found: list[tuple[Tokens, float, int]] = []
        for drafts in itertools.product(range(self.target.size), repeat=self.k):
            drawn, chance = [self.drafter.drawn(prefix + drafts[:i]) for i in range(self.k)], 1.0
            for draft, q in zip(drafts, drawn, strict=True):
                chance *= float(q[draft]) if draft < len(q) else 0.0
            if chance:
                found.append((drafts, chance, self.policy(drafts, drawn)))
        chains, chances, lengths = zip(*found, strict=True)
        return list(chains), torch.tensor(chances, dtype=torch.float64), torch.tensor(lengths)

    def _chain(self, prefix: Tokens, chains: list[Tokens], lengths: Tensor) -> Chain:
        each = [[self.target(prefix + drafts[:i]) for i in range(self.k + 1)] for drafts in chains]
        target = torch.stack([p for row in each for p in row])
        at = torch.arange(len(target)).view(len(chains), self.k + 1)
        ids = torch.tensor(chains, dtype=torch.int64).view(len(chains), self.k)
        claimed = self.drafter.claimed
        if claimed is None or not self.k:
            return Chain(target, at, ids, lengths)
        draft = [torch.stack([claimed(prefix + drafts[:i]) for i in range(self.k)]) for drafts in chains]
        return Chain(target, at, ids, lengths, torch.stack(draft))


# What it is tried on


def top(p: Tensor, k: int) -> Tensor:
    """The k likeliest tokens."""
    kept = torch.where(p >= p.topk(min(k, len(p))).values[-1], p, 0)
    return kept / kept.sum()


def without(p: Tensor, token: int) -> Tensor:
    kept = p.clone()
    kept[token] = 0
    return kept / kept.sum()


def drafters(target: Model) -> dict[str, Drafter]:
    """Every kind of draft that a round can hold, for `target`."""
    size = target.size
    other = Model(size, target.seed + 1)

    def sampled(q: Callable[[Tokens], Tensor]) -> Drafter:
        return Drafter(q, q)

    return {
        "another model": sampled(other),
        "the target itself": sampled(target),
        "filtered": sampled(Model(size, target.seed + 1, partial(top, k=2))),
        "without the target's best token": sampled(lambda prefix: without(other(prefix), int(target(prefix).argmax()))),
        "a reduced vocabulary": sampled(Model(size - 1, target.seed + 1)),
        "greedy, q kept": sampled(Model(size, target.seed + 1, partial(top, k=1))),
        "point masses": Drafter(Model(size, target.seed + 1, partial(top, k=1)), None),
        "random, taken as they come": Drafter(other, None),
    }


def targets(size: int, seed: int) -> dict[str, Model]:
    return {
        "sampled": Model(size, seed),
        "filtered": Model(size, seed, partial(top, k=2)),
        "greedy": Model(size, seed, partial(top, k=1)),
    }


def policies(k: int) -> dict[str, Policy]:
    """Lawful ways to choose how many drafts are submitted, at most k."""

    def until(stop: Callable[[Tokens, list[Tensor], int], bool]) -> Policy:
        return lambda drafts, q: next((i for i in range(k) if stop(drafts, q, i)), k)

    return {
        "always k": lambda drafts, q: k,
        "stop after an unlikely draft": until(lambda drafts, q, i: i > 0 and float(q[i - 1][drafts[i - 1]]) < 0.3),
        "stop before an unsure draft": until(lambda drafts, q, i: float(q[i].max()) < 0.55),
        "by the drafts so far": until(lambda drafts, q, i: sum(drafts[:i]) % 3 == 2),
    }


def cases(method: Method, name: str) -> list[Case]:
    """Targets x drafters x policies on three tokens, every depth up to 3, and six tokens once per drafter."""
    found = []
    for label, target in targets(3, 11).items():
        for drafter_name, drafter in drafters(target).items():
            for policy_name, policy in policies(2).items():
                title = f"{name}: {label} target, drafts {drafter_name}, {policy_name}"
                found.append(Case(title, target, drafter, policy, method))
    target = Model(3, 23)
    for k in (0, 1, 3):
        for drafter_name, drafter in drafters(target).items():
            found.append(
                Case(f"{name}: drafts {drafter_name}, k = {k}", target, drafter, policies(k)["always k"], method, k)
            )
    target = Model(6, 31)
    for drafter_name, drafter in drafters(target).items():
        title = f"{name}: six tokens, drafts {drafter_name}"
        found.append(Case(title, target, drafter, policies(2)["always k"], method, tokens=2))
    return found


# Coupled sampling


def coupled(seeds: int = 8, tokens: int = 8, k: int = 3) -> Check:
    """Coupled sampling against drawing token by token, over noise tables (seeds) and every drafter, one row each.

    Its noise is a table g[position, token] for each seed, so one seed is one outcome, and outcomes must be equal.
    """
    target = Model(5, 47)
    equal = total = 0
    for seed in range(seeds):
        wanted: Tokens = ()
        while len(wanted) < tokens:
            wanted += (_drawn(target(wanted), seed, len(wanted)),)
        for drafter in drafters(target).values():
            equal += _coupled_tokens(target, drafter, seed, tokens, k) == wanted
            total += 1
    found = f"{equal} of {total} sequences equal"
    return check(0, "coupled: tabulated noise, every drafter", equal == total, found, "all")


def _drawn(p: Tensor, seed: int, position: int) -> int:
    one = torch.tensor([seed])
    return int(sample(p.log().float()[None], torch.tensor([position]), unfiltered(one))[0])


def _coupled_tokens(target: Model, drafter: Drafter, seed: int, tokens: int, k: int) -> Tokens:
    """Decoded in rounds, by the kernels that serve: draw at every position, keep what the drafts got right."""
    out: Tokens = ()
    while len(out) < tokens:
        drafts: Tokens = ()
        for _ in range(k):
            drafts += (_drawn(drafter.drawn(out + drafts), seed, len(out) + len(drafts)),)
        logits = torch.stack([target(out + drafts[:i]).log().float() for i in range(k + 1)])
        at = torch.arange(k + 1) + len(out)
        drawn = sample(logits, at, unfiltered(torch.full((k + 1,), seed)))
        ends, none = torch.tensor([0, k + 1], dtype=torch.int32), torch.full((1, 1), -1)
        emitted, count, *_ = accept(drawn, torch.tensor([drafts]), torch.tensor([k]), ends, none, torch.tensor([True]))
        out += tuple(emitted[0, : int(count[0])].tolist())
    return out[:tokens]
