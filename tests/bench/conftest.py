"""The benchmarks of these tests are of models so small that a second thread only costs."""

from collections.abc import Iterator

import pytest
import torch


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
