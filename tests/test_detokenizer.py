"""Text token by token, with a tokenizer of ten lines: bytes are tokens, so any UTF-8 character can be split."""

import pytest

from specdec.detokenizer import Detokenizer


class Bytes:
    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def feed(text, stop=()):
    """Tokens taken, text at the end, and everything that could be shown after each token."""
    d = Detokenizer(Bytes(), stop)
    shown = []
    for n, byte in enumerate(text.encode(), 1):
        stopped = d.add(byte)
        shown.append(d.text[: d.shown])
        if stopped:
            return n, d.finish(), shown
    return len(text.encode()), d.finish(), shown


@pytest.mark.parametrize("text", ["plain", "a€b", "日本語のテキスト", "👩‍👩‍👧‍👦!", ""])
def test_text_is_whole_and_characters_are_never_split(text):
    _, final, shown = feed(text)
    assert final == text
    assert all("\ufffd" not in s and text.startswith(s) for s in shown)


def test_an_unfinished_character_shows_at_the_end():
    d = Detokenizer(Bytes())
    for byte in "a€".encode()[:-1]:
        d.add(byte)
    assert d.text == "a"
    assert d.finish() == "a\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "kept", "taken"),
    [
        ("hello END world", ("END",), "hello ", 9),
        ("aab", ("ab",), "a", 3),
        ("xx<|x|>yy", ("<|x|>", "|"), "xx<", 4),
        ("no stop here", ("zzz",), "no stop here", 12),
        ("日本。語", ("。",), "日本", 9),
        ("ends with it STOP", ("STOP",), "ends with it ", 17),
    ],
)
def test_stop_strings_cut_at_the_first_that_completes(text, stop, kept, taken):
    n, final, shown = feed(text, stop)
    assert (final, n) == (kept, taken)
    assert all(kept.startswith(s) for s in shown), "shown text was taken back"


def test_a_possible_stop_is_held_back_and_released():
    _, _, shown = feed("ab ST ab", ("STOP",))
    assert shown[3] == shown[4] == "ab "
    assert shown[5] == "ab ST "
