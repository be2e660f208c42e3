"""The model of a file's tests, and a drafter that is mostly right."""

import copy

import pytest
from support import tiny


@pytest.fixture(scope="module")
def model():
    """One object for the file; every test disables it."""
    return copy.deepcopy(tiny("llama"))


@pytest.fixture(scope="module")
def near():
    return copy.deepcopy(tiny("llama", noise=0.01))
