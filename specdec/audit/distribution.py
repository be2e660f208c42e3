"""Level 4: whole sampled outputs against the model's own probabilities, and against those of plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.audit.report import Check, check
from specdec.audit.statistics import ALPHA, ALPHA_PERMUTED, chi_square, two_samples, uniform
from specdec.audit.subject import EngineSubject, Output, Request, Subject, forward
from specdec.audit.toys import table_model
from specdec.llm import LLM


def outputs(subject: Subject, requests: int, tokens: int, temperature: float) -> list[Check]:
    """Of `requests` sampled outputs each with speculation on and off, seeds of their own."""

    def asked(first: int) -> list[Request]:
        prompts = [subject.prompts[i % len(subject.prompts)] for i in range(requests)]
        return [Request(prompt, temperature, first + i, tokens) for i, prompt in enumerate(prompts)]

    on, off = asked(50_000), asked(90_000)
    speculative, plain = subject.decode(on, speculative=True), subject.decode(off, speculative=False)
    found = []
    if subject.model is not None:
        values = torch.cat([ranks(subject.model, r, o) for r, o in zip(on, speculative, strict=True)])
        p = uniform(values)
        name = f"{len(values)} sampled tokens at temperature {temperature:g}, against the model's probabilities"
        found.append(check(4, name, p > ALPHA, f"p = {p:.3g}", f"> {ALPHA:g}", ALPHA))
    p = two_samples(speculative, plain)
    name = f"{requests} sampled outputs with speculation, {requests} without"
    found.append(check(4, name, p > ALPHA_PERMUTED, f"p = {p:.3g}", f"> {ALPHA_PERMUTED:g}", ALPHA_PERMUTED))
    return found


def ranks(model: PreTrainedModel, request: Request, output: Output) -> Tensor:
    """[len(output)] fp64: for each token the mass of the likelier ones, plus a random share of its own.

    If every token was drawn from the model's distribution after those before it, these numbers are even in [0, 1) and
    independent, however long the output is: the probability integral transform (Rosenblatt 1952).
    """
    logits = forward(model, [*request.prompt, *output])[len(request.prompt) - 1 : -1].double()
    p = (logits / request.temperature).softmax(1)
    own = p.gather(1, torch.tensor(list(output))[:, None])
    above = torch.where(p > own, p, 0).sum(1)
    ties = torch.where(p == own, p, 0).sum(1)
    share = torch.rand(len(output), generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64)
    return above + share * ties


# Models whose probabilities are known, through the whole engine

TOKENS = 48


@dataclass(frozen=True)
class Table:
    """The probabilities of every token of a target and of its drafter, whatever stands before, and how they are decoded.

    Chosen, by search, for how far known mistakes bend them: noise that drafts and residual share; noise that comes back
    when a draft that was thrown away is drafted again; a q that was noted before the filters.
    """

    target: tuple[float, ...]
    draft: tuple[float, ...]
    k: int
    rows: int
    top_k: int = 0

    @property
    def probabilities(self) -> Tensor:
        """Of the target, after top-k: [V] fp64."""
        p = torch.tensor(self.target, dtype=torch.float64)
        if self.top_k:
            p = torch.where(p >= p.topk(self.top_k).values[-1], p, 0)
        return p / p.sum()


TABLES = (
    Table((0.082, 0.015, 0.010, 0.247, 0.022, 0.624), (0.004, 0.421, 0.019, 0.009, 0.120, 0.427), 1, 256),
    Table((0.36, 0.64), (0.64, 0.36), 6, 256),
    Table((0.40, 0.30, 0.20, 0.10), (0.27, 0.29, 0.22, 0.22), 2, 64, top_k=2),
)


def tables(verifier: str, table: Table, device: torch.device) -> Check:
    """Pairs of neighbouring tokens of a model that is a table, drafted for by another table, against what it says."""
    size, rows, long = len(table.target), table.rows, TOKENS + table.k + 1
    logits = (torch.tensor(p).log().expand(size, size) for p in (table.target, table.draft))
    target, draft = (table_model(x).to(device) for x in logits)
    with LLM(
        target, drafter=draft, verifier=verifier, k=table.k, compile=False, max_rows=rows, max_model_len=long
    ) as llm:
        subject = EngineSubject(llm, [[0]], "tables", verifier)
        asked = [Request([i % size], 1.0, i, TOKENS, {"top_k": table.top_k}) for i in range(rows)]
        found = subject.decode(asked, speculative=True)
        accepted = llm.stats.acceptance_rate
    counts = torch.zeros(size, size, dtype=torch.float64)
    for request, output in zip(asked, found, strict=True):
        for a, b in zip([*request.prompt, *output], output, strict=False):
            counts[a, b] += 1
    expected = counts.sum(1, keepdim=True) * table.probabilities
    p = chi_square(counts, expected, lost=size)
    filtered = f", top-k {table.top_k}" if table.top_k else ""
    name = f"{rows * TOKENS} tokens of a table of {size}{filtered}, {verifier}, k = {table.k}, {accepted:.0%} accepted"
    return check(4, name, p > ALPHA, f"p = {p:.3g}", f"> {ALPHA:g}", ALPHA)
