"""Which pairs of models speak the same tokens."""

import types

import pytest

from specdec.draft import check_vocabulary


def sized(n):
    config = types.SimpleNamespace(vocab_size=n)
    return types.SimpleNamespace(config=types.SimpleNamespace(get_text_config=lambda: config))


def words(**vocabulary):
    return types.SimpleNamespace(get_vocab=lambda: vocabulary)


@pytest.mark.parametrize("size", [1000, 1024, 1999, 2000, 2023])
def test_padding_of_the_embedding_is_no_difference(size):
    check_vocabulary(sized(1000), sized(size), None, None) if size < 2000 else None
    check_vocabulary(sized(1000), sized(size), words(a=0), words(a=0))
    same = words(a=0)
    if size >= 2024:
        with pytest.raises(ValueError, match="drafter: expected a vocabulary of 1000"):
            check_vocabulary(sized(1000), sized(size), same, same)


@pytest.mark.parametrize("tokenizers", [(None, None), (words(a=0), None), (None, words(a=0))])
def test_without_two_tokenizers_sizes_tell(tokenizers):
    with pytest.raises(ValueError, match="drafter: expected a vocabulary of 1000 tokens, the target's, got 2024"):
        check_vocabulary(sized(1000), sized(2024), *tokenizers)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"a": 0, "b": 2}, "2 entries differ, first 'b' at id 1"),
        ({"a": 0}, "1 entries differ, first 'b' at id 1"),
        ({"a": 1, "b": 0}, "4 entries differ, first '[ab]' at id 0"),
    ],
)
def test_the_first_difference_is_named(theirs, message):
    with pytest.raises(ValueError, match=f"drafter: expected the target's vocabulary, got another one: {message}"):
        check_vocabulary(sized(10), sized(10), words(a=0, b=1), words(**theirs))
