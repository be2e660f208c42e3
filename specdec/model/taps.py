"""Hidden states of chosen decoder layers, of the newest paged forward: what drafters like EAGLE read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specdec.model import attention


class Taps:
    """Forward hooks on decoder layers. `hidden[i]` [N, hidden] is what layer i gave in the newest paged forward.

    Inside a CUDA graph that is the graph's own memory: read it within the round, or before the next replay.
    """

    def __init__(self, layers: list[nn.Module], wanted: Iterable[int]):
        self.hidden: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        wanted = sorted(set(wanted))
        for i in wanted:
            if not 0 <= i < len(layers):
                raise ValueError(f"layers: expected numbers of 0 to {len(layers) - 1}, got {i}")
        for i in wanted:
            self._hooks.append(layers[i].register_forward_hook(self._noting(i)))

    def _noting(self, i: int) -> Any:
        def note(module: nn.Module, args: tuple, output: Any) -> None:
            if attention.in_step():
                states = output[0] if isinstance(output, tuple) else output
                self.hidden[i] = states.flatten(0, -2)  # [1, N, hidden] in most models

        return note

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self.hidden.clear()
