"""The benchmarks of these tests are of models so small that a second thread only costs; the page is shown in a Chromium.

Without one test_browser.py is not collected, and the report's header says so: no count hides what did not run.
"""

from collections.abc import Iterator

import pytest
import torch
from browser import find_chromium

collect_ignore = [] if find_chromium() else ["test_browser.py"]


def pytest_report_header() -> str:
    return f"chromium: {find_chromium() or 'not found, tests/bench/test_browser.py is left out'}"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def small_copies() -> Iterator[None]:
    """The bandwidth's worth is not tested, only that there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.bench.floor._CPU_BYTES", 1 << 20)
        yield
