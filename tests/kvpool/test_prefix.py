"""prefix_keys: a key stands for a block and everything before it."""

import pytest

from specdec.kvpool import prefix_keys

TOKENS = [5, 0, 2**31, 7, 5, 0, 2**31, 7, 5, 0, 1]


@pytest.mark.parametrize(("upto", "expected"), [(0, 0), (2, 0), (3, 1), (8, 2), (9, 3), (11, 3)])
def test_only_full_blocks_inside_upto_get_a_key(upto, expected):
    keys = prefix_keys(TOKENS, 3, upto=upto)
    assert len(keys) == expected and keys == prefix_keys(TOKENS, 3, upto=11)[:expected]
    assert all(isinstance(key, bytes) and len(key) == 16 for key in keys)


def test_a_key_depends_on_every_token_before_the_end_of_its_block():
    keys = prefix_keys(TOKENS, 2, upto=10)
    for position in range(10):
        changed = [*TOKENS[:position], 99, *TOKENS[position + 1 :]]
        others = prefix_keys(changed, 2, upto=10)
        same = [a == b for a, b in zip(keys, others, strict=True)]
        assert same == [block < position // 2 for block in range(5)]


def test_equal_blocks_at_different_depth_have_different_keys():
    keys = prefix_keys([4, 4] * 5, 2, upto=10)
    assert len(set(keys)) == 5


def test_the_salt_changes_every_key():
    plain, salted = prefix_keys(TOKENS, 3, upto=9), prefix_keys(TOKENS, 3, upto=9, salt=b"revision 2")
    assert not set(plain) & set(salted)


def test_keys_are_extended_in_place_at_the_cost_of_the_new_blocks():
    keys = prefix_keys(TOKENS, 3, upto=5, salt=b"s")
    forgotten = [-1] * 3 + TOKENS[3:]  # the first block is not read again
    assert prefix_keys(forgotten, 3, upto=11, salt=b"s", keys=keys) is keys
    assert keys == prefix_keys(TOKENS, 3, upto=11, salt=b"s")


def test_keys_past_upto_are_left_out_of_the_result_only():
    keys = prefix_keys(TOKENS, 3, upto=9)
    assert prefix_keys(TOKENS, 3, upto=8, keys=keys) == keys[:2] and len(keys) == 3


@pytest.mark.parametrize(
    ("block_size", "upto", "message"),
    [(0, 1, "block_size: expected at least 1, got 0"), (2, 12, "upto: expected 0..11"), (2, -1, "got -1")],
)
def test_bad_input_is_refused(block_size, upto, message):
    with pytest.raises(ValueError, match=message):
        prefix_keys(TOKENS, block_size, upto=upto)
