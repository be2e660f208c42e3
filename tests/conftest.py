"""What every test needs before the first import of triton: the interpreter where there is no GPU, and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from specdec.loading import Loaded, load_model

_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, min(2, os.cpu_count() or 1) // _WORKERS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is a GPU Triton compiles and can't interpret: those tests are deselected, tests/gpu has their cases."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        left = [item for item in items if item.get_closest_marker("interpreter")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """The demo model in fp32 on the CPU, one object for the session: tests leave it as they found it."""
    return load_model("smollm2-135m", dtype="float32", device="cpu")
