"""Verifiers: what turns target logits into emitted tokens."""

from specdec.verify.base import Accepted, Verification, Verifier
from specdec.verify.coupled import CoupledVerifier

__all__ = ["Accepted", "CoupledVerifier", "Verification", "Verifier"]
