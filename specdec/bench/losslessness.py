"""Whether a method emitted plain decoding's tokens, and where and by what margin not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

SHOWN = 5
"""First differences that are looked at with their margin; each costs a forward over its whole prefix."""


@dataclass(frozen=True)
class Difference:
    """The first token of a request that differs. token: its number in the output, from 0.

    margin: how much larger the target's logit of the plain token is than that of the other, over the same prefix, in an
    ordinary forward. Near 0, below the rounding of the dtype, it is a near tie; a large one is an error.
    """

    request: int
    token: int
    plain_id: int | None
    other_id: int | None
    margin: float | None


@dataclass(frozen=True)
class Losslessness:
    """compared: requests; identical: how many had plain's tokens from first to last. differences: the first SHOWN."""

    against: str
    compared: int
    identical: int
    differences: list[Difference]

    @property
    def line(self) -> str:
        """What every result is shown with."""
        if self.identical == self.compared:
            return f"identical to {self.against} ({self.compared} of {self.compared} requests)"
        first = self.differences[0]
        margin = "" if first.margin is None else f", margin {first.margin:.3g}"
        return (
            f"{self.compared - self.identical} of {self.compared} requests differ from {self.against}, "
            f"first: request {first.request + 1} at token {first.token}{margin}"
        )


def compare_tokens(
    plain: list[list[int]], other: list[list[int]], margin: Callable[[int, int, int, int], float | None], against: str
) -> Losslessness:
    """Of the same requests by two methods. margin(request, token, plain_id, other_id): see Difference."""
    found = [(i, first_difference(a, b)) for i, (a, b) in enumerate(zip(plain, other, strict=True))]
    unequal = [(i, n) for i, n in found if n is not None]
    differences = []
    for i, n in unequal[:SHOWN]:
        a, b = (ids[n] if n < len(ids) else None for ids in (plain[i], other[i]))
        differences.append(Difference(i, n, a, b, None if a is None or b is None else margin(i, n, a, b)))
    return Losslessness(against, len(found), len(found) - len(unequal), differences)


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first place where two outputs differ, the end of the shorter one counting; None if they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def logit_margin(model: PreTrainedModel, prefix: list[int], plain_id: int, other_id: int) -> float:
    """Logit of `plain_id` less that of `other_id` after `prefix`, by an ordinary forward of `model`."""
    ids = torch.tensor([prefix], device=model.get_input_embeddings().weight.device)
    logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    return float(logits[plain_id] - logits[other_id])
