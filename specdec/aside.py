"""A stream beside the main one, for work in which the host waits for the device while the device has other things to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """Work of the current stream up to a `mark`, and then `after` it, without what was enqueued in between.

    What is made there may be used in the main stream from the end of the block on. Without CUDA everything is in order
    anyway, and nothing happens.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """This place in the current stream."""
        return torch.cuda.current_stream().record_event() if self._stream else None

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Within it, what runs waits for `mark` alone; behind it the main stream waits for that. None: as if it weren't there.

        Memory of one stream is safe in the other: each block begins behind a later mark than all uses of what it frees.
        """
        if self._stream is None or mark is None:
            yield
            return
        main = torch.cuda.current_stream()
        self._stream.wait_event(mark)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            main.wait_stream(self._stream)
