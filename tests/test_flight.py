"""What a round took, as a policy is told."""

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.flight import Flight


@pytest.mark.parametrize(
    ("host", "took"),
    [
        (0.0, 0.5),
        (0.4, 0.5),
        (0.8, 0.8),
        (60.0, 2.0),  # a pause: held against drafts as it is, they would be left alone for tens of thousands of rounds
    ],
)
def test_the_longer_one_counts_but_no_pause_of_the_host(host, took):
    watch: Any = SimpleNamespace(read=lambda: 0.5)
    empty: Any = None
    flight = Flight(1, empty, empty, empty, [], frozenset(), empty, empty, {}, watch, fair=True, host_s=host)
    assert flight.seconds == took
