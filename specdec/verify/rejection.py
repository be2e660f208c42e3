"""The ratio test, token by token: Leviathan, Kalman, Matias (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318)."""

from __future__ import annotations

import torch

from specdec.verify.chain import Chain, Decision


def rejection(chain: Chain) -> Decision:
    """Draft x stands with probability min(1, P(x) / Q(x)) while all before it stand; the residual is max(P - Q, 0).

    One number below the product of these probabilities decides what the tests one after another would.
    """
    survival = chain.ratios().clamp(max=1).cumprod(1)
    return Decision(survival, torch.ones_like(chain.at, dtype=chain.target.dtype))
