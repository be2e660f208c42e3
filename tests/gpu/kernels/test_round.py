"""The round's small kernels natively: what their twins give on the CPU."""

import pytest

from tests.kernels.test_round import assert_same, whole_round


@pytest.mark.parametrize("batch", [1, 2, 31, 64, 129, 256])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_kernels_give_what_their_twins_give(batch, k):
    for seed, share in enumerate((0.2, 0.6, 1.0)):
        tokens = int(share * batch * (k + 1))
        assert_same(whole_round(batch, k, tokens, seed, "cuda"), whole_round(batch, k, tokens, seed))
