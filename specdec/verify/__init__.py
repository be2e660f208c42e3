"""Verifiers: what turns target logits into emitted tokens."""

from collections.abc import Callable
from functools import partial

from specdec.verify.base import Accepted, Verification, Verifier
from specdec.verify.block import block
from specdec.verify.chain import Chain, ChainVerifier, Decision
from specdec.verify.coupled import CoupledVerifier
from specdec.verify.rejection import rejection

VERIFIERS: dict[str, Callable[[int], Verifier]] = {
    "coupled": CoupledVerifier,
    "rejection": partial(ChainVerifier, rejection),
    "block": partial(ChainVerifier, block),
}
"""By name, each to be called with the number of ids that may be drawn."""

__all__ = [
    "VERIFIERS",
    "Accepted",
    "Chain",
    "ChainVerifier",
    "CoupledVerifier",
    "Decision",
    "Verification",
    "Verifier",
    "block",
    "rejection",
]
