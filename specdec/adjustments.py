"""What running rows want done to their logits, on the device: the tables that `kernels.adjust` reads, filled as rows join.

They are made when the first row needs them and keep their place, since captured rounds hold them. A round itself counts
what it emits, so the host may be rounds behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.columns import BANS, BIAS, PENALTIES, Adjustments
from specdec.sampling import BAN_LENGTH, MOST_BANS, SamplingParams
from specdec.sequence import Sequence
from specdec.uploads import send


class AdjustmentTables:
    """Tables for `num_rows` rows and a vocabulary of `vocab_size`; see `table_bytes`."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size

        def table(dtype: torch.dtype, *size: int, fill: float = 0) -> Tensor:
            return torch.full((num_rows, *size), fill, dtype=dtype, device=device)

        self.columns = Adjustments(
            flags=table(torch.int64),
            repetition=table(torch.float32, fill=1.0),
            presence=table(torch.float32),
            frequency=table(torch.float32),
            counts=table(torch.int32, vocab_size),
            bias=table(torch.float32, vocab_size),
            bans=table(torch.int32, MOST_BANS, BAN_LENGTH, fill=-1),
            until=table(torch.int64, MOST_BANS),
        )

    def join(self, row: int, seq: Sequence) -> None:
        """Put what `seq` asks for into `row`, with the tokens that it has so far."""
        p, columns = seq.params, self.columns
        flags = PENALTIES * p.penalties | BIAS * p.biases | BANS * bool(seq.bans)
        columns.flags[row : row + 1].fill_(flags)
        if p.penalties:
            columns.repetition[row : row + 1].fill_(p.repetition_penalty or 1.0)
            columns.presence[row : row + 1].fill_(p.presence_penalty)
            columns.frequency[row : row + 1].fill_(p.frequency_penalty)
            send(counts_of(seq, self.vocab_size), columns.counts[row])
        if p.biases:
            send(bias_of(p, self.vocab_size), columns.bias[row])
        if seq.bans:
            bans, until = torch.full((MOST_BANS, BAN_LENGTH), -1, dtype=torch.int32), torch.zeros(MOST_BANS).long()
            for i, (tokens, end) in enumerate(seq.bans):
                bans[i, BAN_LENGTH - len(tokens) :] = torch.tensor(tokens, dtype=torch.int32)
                until[i] = end
            send(bans, columns.bans[row])
            send(until, columns.until[row])


def table_bytes(num_rows: int, vocab_size: int) -> int:
    """Memory that the tables take, in bytes: a count and a bias for each token of a row, and its bans."""
    return num_rows * (8 * vocab_size + MOST_BANS * (4 * BAN_LENGTH + 8) + 20)


def counts_of(seq: Sequence, vocab_size: int) -> Tensor:
    """[V] int32, see `Adjustments.counts`."""
    prompt, output = torch.tensor(seq.token_ids[: seq.prompt_len]), torch.tensor(seq.output_ids, dtype=torch.int64)
    present = torch.bincount(prompt, minlength=vocab_size).clamp(max=1)
    return (present + 2 * torch.bincount(output, minlength=vocab_size)).int()


def bias_of(p: SamplingParams, vocab_size: int) -> Tensor:
    """[V] fp32: logit_bias, and -inf for bad words of one token and for what is not allowed."""
    bias = torch.zeros(vocab_size)
    for token, value in p.biased_tokens:
        bias[token] += value
    if p.allowed_token_ids is not None:
        allowed = torch.full((vocab_size,), -torch.inf)
        allowed[list(p.allowed_token_ids)] = 0.0
        bias += allowed
    for word in p.bad_words or ():
        if len(word) == 1:
            bias[int(word[0])] = -torch.inf
    return bias
