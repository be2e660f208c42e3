"""What the profiler saw of a device: how long it was busy, what it waited for, what it copied, and for which part of a round.

Kernels that start while the one before them ends (kernels/dependent.py) overlap, so times are those of unions of
intervals, never sums.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MARK = "specdec."
"""Begins the names of the sections (`torch.profiler.record_function`) that tell the parts of a round apart."""
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_COPY = re.compile(r"Memcpy ([DHP])to([DHP])")


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel, copy or fill on the device. start, end: microseconds.

    launch: which call brought it; all of a CUDA graph share one. bytes: copied or filled, 0 for a kernel.
    part: the innermost section in which it was launched, without MARK; "" outside of all.
    """

    name: str
    start: float
    end: float
    launch: int
    bytes: int = 0
    part: str = ""


@dataclass(frozen=True)
class Copied:
    """Bytes that a round copied, on average: within the device, from it to the host, and from the host to it."""

    on_device: float
    to_host: float
    from_host: float

    @property
    def line(self) -> str:
        return (
            f"copied in a round: {self.on_device:,.0f} bytes device to device, {self.to_host:,.0f} to the host, "
            f"{self.from_host:,.0f} from it"
        )


@dataclass(frozen=True)
class Timeline:
    """The work of a device in the order in which it began."""

    works: list[Work]

    @classmethod
    def of(cls, profile: torch.profiler.profile) -> Timeline:
        """Of a profile that has ended, whose trace was not exported yet."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(file))
            return cls.read(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])

    @classmethod
    def read(cls, events: Iterable[dict[str, Any]]) -> Timeline:
        """Of the `traceEvents` of a trace, in the format of Kineto, the profiler beneath torch's."""
        events = [event for event in events if event.get("ph") == "X"]
        launches = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in _LAUNCHES and _launch(e)}
        sections = _Sections(e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(MARK))
        works = [
            Work(
                name=e["name"], start=e["ts"], end=e["ts"] + e["dur"], launch=_launch(e),
                bytes=e["args"].get("bytes", 0), part=sections.around(launches.get(_launch(e))),
            )
            for e in events if e.get("cat") in _WORK
        ]  # fmt: skip
        return cls(sorted(works, key=lambda work: work.start))

    def later(self, share: float) -> Timeline:
        """Without what began in the first `share` of the time: the beginning of a recording is slow."""
        begin = self.works[0].start + share * self.whole_us if self.works else 0.0
        return Timeline([work for work in self.works if work.start >= begin])

    @property
    def whole_us(self) -> float:
        """From the beginning of the first work to the end of the last."""
        return max(work.end for work in self.works) - self.works[0].start if self.works else 0.0

    def busy_us(self, part: str | None = None) -> float:
        """In which there was any work; with `part`, any of that part."""
        gaps = self._gaps(part)
        works = [work for work in self.works if part in (None, work.part)]
        return Timeline(works).whole_us - sum(gap for gap, _ in gaps)

    @property
    def waiting_us(self) -> float:
        """Idle between two launches: the device had nothing to do until the host brought the next."""
        return sum(gap for gap, within in self._gaps(None) if not within)

    @property
    def between_us(self) -> float:
        """Idle within a launch: between the kernels of a CUDA graph."""
        return sum(gap for gap, within in self._gaps(None) if within)

    def copied(self, rounds: int) -> Copied:
        """All copies, divided among so many rounds."""
        total = {"DD": 0, "DH": 0, "HD": 0, "HH": 0}
        for work in self.works:
            if found := _COPY.match(work.name):
                total["".join(found.groups()).replace("P", "D")] += work.bytes  # P: of two devices
        return Copied(*(total[way] / rounds for way in ("DD", "DH", "HD")))

    def _gaps(self, part: str | None) -> Iterator[tuple[float, bool]]:
        """Microseconds in which there was no work, and whether what stood on both sides came by one launch."""
        last: Work | None = None
        for work in self.works:
            if part not in (None, work.part):
                continue
            if last is not None and work.start > last.end:
                yield work.start - last.end, work.launch == last.launch
            if last is None or work.end > last.end:
                last = work


class _Sections:
    """Marked stretches of the host's time; they nest or follow each other."""

    def __init__(self, events: Iterable[dict[str, Any]]):
        self._spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(MARK)) for e in events)
        self._starts = [start for start, _, _ in self._spans]

    def around(self, moment: float | None) -> str:
        """The innermost one that holds `moment`, or ""."""
        if moment is None:
            return ""
        before = self._spans[: bisect_right(self._starts, moment)]
        return next((name for _, end, name in reversed(before) if end >= moment), "")


def _launch(event: dict[str, Any]) -> int:
    """0 where the trace names none."""
    return event.get("args", {}).get("correlation", 0)
