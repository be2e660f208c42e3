"""What a stopwatch counts, on a clock that is wound by hand."""

import time

import pytest
import torch

from specdec.stopwatch import Laps, Stopwatch, timed


def stages():
    yield
    return "over"


def test_pauses_do_not_count(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    launch = timed(stages(), watch)
    next(launch)
    with pytest.raises(StopIteration) as end:
        next(launch)
    assert watch.stop().done and watch.read() == 3.0
    assert end.value.value == "over"


def test_without_a_watch_the_stages_are_the_same():
    assert list(timed(stages(), None)) == [None]


def test_laps_leave_out_what_is_not_to_count(monkeypatch):
    clock = iter([5.0, 7.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    laps = Laps()
    laps.lap(1.0)
    assert laps.lap(1.5) == 1.5 and laps.lap(1.5) == 5.0
