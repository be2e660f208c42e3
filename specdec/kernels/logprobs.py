"""Log-probabilities of tokens and of the likeliest ones beside them.

Torch operations of fixed shapes on every device: they are asked for seldom, and cost a few passes over the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """[T, 1 + 2 * top] fp64: the token's log-probability, then the `top` likeliest ids, then theirs, best first.

    logits [T, V], tokens [T] int64; ids and fp32 numbers both fit into fp64 exactly, so that one copy brings them home.
    Where the vocabulary has fewer than `top`, the rest are -inf.
    """
    x = logits.float()
    total = x.logsumexp(1, keepdim=True)
    chosen = x.gather(1, tokens.clamp(min=0)[:, None]) - total
    values, ids = x.topk(min(top, x.shape[1]), 1)
    missing = (0, top - values.shape[1])
    theirs = torch.nn.functional.pad((values - total).double(), missing, value=-torch.inf)
    return torch.cat([chosen.double(), torch.nn.functional.pad(ids.double(), missing), theirs], 1)


def emitted_logprobs(logits: Tensor, token_ids: Tensor, row: Tensor, cu_seqlens_q: Tensor, top: int) -> Tensor:
    """[B, k + 1, 1 + 2 * top] fp64: `logprobs` of what a round emitted; garbage past a row's last token.

    logits [N, V] of the packed tokens, row [N] their rows; row b's are those from cu_seqlens_q[b] on, and the j-th of
    them draws token_ids[b, j] ([B, k + 1] int64).
    """
    count, width = len(logits), token_ids.shape[1]
    begin = cu_seqlens_q.long()
    offset = torch.arange(count, device=logits.device) - begin[row]
    table = logprobs(logits, token_ids[row, offset.clamp(0, width - 1)], top)
    at = begin[:-1, None] + torch.arange(width, device=logits.device)
    return table[at.clamp(max=count - 1)]
