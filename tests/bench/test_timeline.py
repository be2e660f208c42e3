"""What is told of a device by a trace: overlapping kernels, gaps, copies, and the parts of a round that launched them."""

import pytest
import torch

from specdec.bench.split import of_timelines
from specdec.bench.timeline import Timeline


def kernel(start: float, end: float, launch: int, **more) -> dict:
    args = {"correlation": launch, "stream": 7}
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": start, "dur": end - start, "args": args} | more


def copy(name: str, start: float, end: float, launch: int, size: int) -> dict:
    args = {"correlation": launch, "bytes": size}
    return kernel(start, end, launch, cat="gpu_memcpy", name=f"Memcpy {name}", args=args)


def launch(at: float, number: int, cat: str = "cuda_runtime") -> dict:
    return {"ph": "X", "cat": cat, "name": "launch", "ts": at, "dur": 1.0, "args": {"correlation": number}}


def section(name: str, start: float, end: float) -> dict:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "args": {}}


GRAPHS = [
    # Two rounds, each a graph of kernels that start before the one before them ends, and a copy to the host behind it.
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 3.0, "id": 1},
    launch(0.0, 1), launch(1.0, 2), launch(20.0, 3), launch(21.0, 4),
    kernel(10.0, 14.0, 1), kernel(13.0, 18.0, 1), kernel(15.0, 17.0, 1), kernel(20.0, 22.0, 1),
    copy("DtoH (Device -> Pinned)", 23.0, 24.0, 2, 400),
    copy("HtoD (Pinned -> Device)", 30.0, 31.0, 3, 80),
    kernel(31.0, 36.0, 4), kernel(34.0, 40.0, 4),
]  # fmt: skip


def test_kernels_that_overlap_count_once() -> None:
    line = Timeline.read(GRAPHS)
    assert len(line.works) == 8 and line.whole_us == 30
    assert line.busy_us() == 8 + 2 + 1 + 1 + 9
    assert line.between_us == 2, "18 to 20, within the first graph"
    assert line.waiting_us == 1 + 6, "between the graph, the copies and the next graph"
    assert line.busy_us() + line.between_us + line.waiting_us == line.whole_us


def test_copies_by_direction() -> None:
    copied = Timeline.read([*GRAPHS, copy("DtoD (Device -> Device)", 41, 42, 5, 64), copy("PtoP", 42, 43, 6, 6)])
    assert copied.copied(2).on_device == 35 and copied.copied(2).to_host == 200 and copied.copied(2).from_host == 40
    line = Timeline.read(GRAPHS).copied(2).line
    assert line == "copied in a round: 0 bytes device to device, 200 to the host, 40 from it"


def test_later_leaves_the_beginning_out() -> None:
    assert [work.start for work in Timeline.read(GRAPHS).later(0.5).works] == [30, 31, 34]
    empty = Timeline.read([])
    assert empty.later(0.5).works == [] and empty.whole_us == empty.busy_us() == 0


STEPPED = [
    section("specdec.run", 0, 100), section("specdec.propose", 10, 30), section("specdec.extend", 40, 60),
    section("specdec.accept", 70, 80), section("somebody else's", 0, 100),
    launch(5, 1), launch(15, 2), launch(25, 3, "cuda_driver"), launch(45, 4), launch(75, 5), launch(90, 6),
    kernel(100, 101, 1), kernel(110, 114, 2), kernel(112, 118, 3), kernel(130, 154, 4), kernel(160, 164, 5),
    kernel(170, 173, 6), kernel(180, 185, 77),
]  # fmt: skip


def test_work_belongs_to_the_innermost_section_that_launched_it() -> None:
    line = Timeline.read(STEPPED)
    assert [work.part for work in line.works] == ["run", "propose", "propose", "extend", "accept", "run", ""]
    assert line.busy_us("propose") == 8 and line.busy_us("run") == 4 and line.busy_us("") == 5


def test_the_parts_and_what_lacks_make_up_the_measured_round() -> None:
    """Shares by the rounds step by step, idle times by those as they were measured, and the round's own time."""
    settled = [kernel(-100, -99, 9), *GRAPHS]  # before the last three quarters of the recording
    split = of_timelines(Timeline.read(settled), Timeline.read(STEPPED), 2, round_ms=60.0)
    assert split is not None and split.copied is not None and split.copied.on_device == 0
    assert split.draft_ms == pytest.approx(42 * 8 / 40) and split.verify_ms == pytest.approx(42 * 24 / 40)
    assert split.sample_ms == split.other_ms == pytest.approx(42 * 4 / 40)
    assert split.host_ms == pytest.approx(14) and split.idle_ms == pytest.approx(4)
    assert of_timelines(Timeline.read([]), Timeline.read(STEPPED), 2, 60.0) is None
    assert of_timelines(Timeline.read(GRAPHS), Timeline.read([]), 2, 60.0) is None


def test_a_profile_of_the_host_alone_has_no_work() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).add_(1)
    assert Timeline.of(profile).works == []
