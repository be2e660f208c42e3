"""Levels 2 and 3: the same tokens with speculation on and off, and what a difference weighs."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.audit.report import Check, check, skipped
from specdec.audit.subject import EngineSubject, Output, Request, Subject, forward
from specdec.bench.losslessness import first_difference
from specdec.kernels.reference.philox import gumbel

ROUNDING = 64
"""Units of fp32 rounding of a logit that are no difference; what half precision adds is measured."""


def greedy(subject: Subject, requests: int, tokens: int, tolerance: float | None) -> list[Check]:
    """Level 2. tolerance: the noise of logits to allow for, None to measure it on the subject's model."""
    asked = _requests(subject, requests, tokens, temperature=0.0)
    plain, other = subject.decode(asked, speculative=False), subject.decode(asked, speculative=True)
    noise = _noise(subject, asked, plain) if tolerance is None else tolerance
    found = [_compare(2, "greedy, on against off", subject, asked, plain, other, noise)]
    if subject.model is not None:
        found.append(_own(subject.model, asked, other, noise or 0.0))
    return found


def seeds(subject: Subject, requests: int, tokens: int, tolerance: float | None) -> list[Check]:
    """Level 3: sampled, with and without filters, and with what changes inside a block: penalties."""
    if subject.seeded:
        return [skipped(3, "seeded, on against off", subject.seeded)]
    settings = {
        "temperature 1": {},
        "top-k 20, top-p 0.9, min-p 0.02": dict(top_k=20, top_p=0.9, min_p=0.02),
        "penalties": dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    }
    found = []
    for name, options in settings.items():
        asked = _requests(subject, requests, tokens, temperature=1.0, options=options)
        plain, other = subject.decode(asked, speculative=False), subject.decode(asked, speculative=True)
        noise = _noise(subject, asked, plain) if tolerance is None else tolerance
        found.append(_compare(3, f"seeded, {name}, on against off", subject, asked, plain, other, noise))
    return found


def width_noise(model: PreTrainedModel, token_ids: list[int], steps: int = 4) -> float:
    """How much a logit changes with the number of tokens in a forward: the whole output's against shorter ones', at most."""
    whole = forward(model, token_ids)
    shorter = range(max(0, len(token_ids) - 1 - steps), len(token_ids) - 1)
    changes = [float((forward(model, token_ids[: i + 1])[-1] - whole[i]).abs().max()) for i in shorter]
    return max([*changes, ROUNDING * torch.finfo(torch.float32).eps * float(whole.abs().max())])


def _requests(
    subject: Subject, count: int, tokens: int, temperature: float, options: dict[str, float] | None = None
) -> list[Request]:
    prompts = [subject.prompts[i % len(subject.prompts)] for i in range(count)]
    return [Request(prompt, temperature, 1000 + i, tokens, options or {}) for i, prompt in enumerate(prompts)]


def _noise(subject: Subject, asked: list[Request], outputs: list[Output]) -> float | None:
    if subject.model is None:
        return None
    longest = max(range(len(asked)), key=lambda i: len(outputs[i]))
    return width_noise(subject.model, [*asked[longest].prompt, *outputs[longest]])


def _compare(
    level: int,
    name: str,
    subject: Subject,
    asked: list[Request],
    plain: list[Output],
    other: list[Output],
    noise: float | None,
) -> Check:
    """Identical, or every first difference a near tie: a margin below twice the noise, one for each of two logits."""
    pairs = zip(asked, plain, other, strict=True)
    unequal = [(r, a, b, n) for r, a, b in pairs if (n := first_difference(list(a), list(b))) is not None]
    bound = "identical" if noise is None else f"identical, or margins below {2 * noise:.2g}"
    if not unequal:
        return check(level, name, True, f"{len(asked)} of {len(asked)} outputs identical", bound)
    margins = [_margin(subject, r, a, b, n) for r, a, b, n in unequal]
    known = [abs(m) for m in margins if m is not None]
    close = noise is not None and len(known) == len(margins) and max(known) <= 2 * noise
    first = unequal[0][3]
    widest = f"widest margin {max(known):.3g}" if known else "margin unknown"
    found = f"{len(unequal)} of {len(asked)} outputs differ, the first at token {first}, {widest}"
    return check(level, name, close, found, bound)


def _margin(subject: Subject, request: Request, plain: Output, other: Output, at: int) -> float | None:
    """In the scores that were compared: logits over the temperature plus noise; only where nothing else was asked for."""
    margin = subject.margin(request, plain, other, at)
    if margin is None or request.temperature == 0:
        return margin
    if request.options or not isinstance(subject, EngineSubject):
        return None
    position = len(request.prompt) + at
    ids: Tensor = torch.tensor([plain[at], other[at]])
    noise = gumbel(torch.tensor(request.seed), torch.tensor(position), ids)
    return margin + request.temperature * float(noise[0] - noise[1])


def _own(model: PreTrainedModel, asked: list[Request], outputs: list[Output], noise: float) -> Check:
    """Each greedy token is the argmax of an ordinary forward over what stands before it, up to the noise."""
    worst = 0.0
    for request, output in zip(asked, outputs, strict=True):
        logits = forward(model, [*request.prompt, *output])[len(request.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        worst = max(worst, float((logits.max(1).values - chosen).max()))
    total = sum(len(output) for output in outputs)
    found = f"{total} tokens, at most {worst:.3g} below the highest logit"
    return check(2, "greedy, against the model's own forward", worst <= 2 * noise, found, f"at most {2 * noise:.2g}")
