"""`output_scores` and `output_logits`: what each step's token was drawn from, kept from the rounds that verified it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.hf.call import Call


class Kept:
    """Vectors of every row and step, [B, new tokens, vocab] fp32 each, where the call asks for them.

    A rejected draft's are written over by the round that decides its step, so the last ones written are those of the
    emitted token.
    """

    def __init__(self, call: Call):
        self.names = [name for name in ("scores", "logits") if call.keeps(name)]
        self._steps = call.new_tokens
        self._prompt_lens = torch.tensor([len(prompt) for prompt in call.prompts])
        self._tensors: dict[str, Tensor] = {}

    def note(self, name: str, values: Tensor, member: Tensor, positions: Tensor) -> None:
        """values [n, vocab] of the tokens at `positions` [n] of the call's rows `member` [n], -1 for none of them."""
        if name not in self.names:
            return
        if name not in self._tensors:
            shape = (len(self._prompt_lens), self._steps, values.shape[1])
            with torch.inference_mode(False):  # the caller may compute gradients with them
                self._tensors[name] = torch.zeros(shape, device=values.device)
        step = positions + 1 - self._prompt_lens.to(member.device)[member]
        ours = (member >= 0) & (step >= 0) & (step < self._steps)
        self._tensors[name][member[ours], step[ours]] = values[ours].float()

    def step(self, name: str, step: int, running: list[bool]) -> Tensor:
        """[B, vocab] of one step that every running row has its token of; zeros for the others."""
        values = self._tensors[name][:, step].clone()
        values[~torch.tensor(running, device=values.device)] = 0
        return values

    def outputs(self, lengths: list[int], device: torch.device) -> dict[str, tuple[Tensor, ...]]:
        """By name, a [B, vocab] for every step of the longest row; zeros past a row's own end. lengths [B]."""
        for tensor in self._tensors.values():
            for row, length in enumerate(lengths):
                tensor[row, length:] = 0
        return {name: tuple(tensor[:, : max(lengths)].to(device).unbind(1)) for name, tensor in self._tensors.items()}
