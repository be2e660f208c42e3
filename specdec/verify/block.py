"""Block verification: the drafts of a row are judged together, so that likely ones rescue those before them.

Sun et al., "Block Verification Accelerates Speculative Decoding" (ICLR 2025, arXiv 2403.10444).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.verify.chain import Chain, Decision


def block(chain: Chain) -> Decision:
    """The longest block i that passes stands: p_i = min(p_{i-1} P(x_i) / Q(x_i), 1), p_0 = 1, and h_i passes it.

    h_i = s_i / (s_i + 1 - p_i) with s_i = sum over v of max(p_i P(v) - Q(v), 0) one step ahead, 1 where that is 0/0;
    h = p at the last draft. The residual after i drafts is max(p_i P - Q, 0).
    """
    joint = _joint(chain.ratios())
    ahead = chain.depth + 1 < chain.lengths[:, None]
    p = joint[:, 1:]
    surplus = torch.cat([chain.surplus(joint[:, :-1])[:, 1:], torch.zeros_like(p[:, :1])], 1)
    spare = surplus + 1 - p
    passes = torch.where(ahead, torch.where(spare > 0, surplus / spare, 1), p)
    fails = torch.where(chain.judged, 1 - passes, 1)
    return Decision(1 - fails.flip(1).cumprod(1).flip(1), joint)


def _joint(ratios: Tensor) -> Tensor:
    """[B, k + 1]: p_0 .. p_k."""
    p = [ratios.new_ones(len(ratios))]
    for ratio in ratios.unbind(1):
        p.append((p[-1] * ratio).clamp(max=1))
    return torch.stack(p, 1)
