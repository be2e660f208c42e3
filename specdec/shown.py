"""Values of users in error messages: short, whatever was passed."""

from __future__ import annotations

import reprlib
from typing import Any

_MOST_BITS = 128


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python itself refuses to write numbers of more than 4,300 digits."""
        return repr(x) if x.bit_length() <= _MOST_BITS else f"an int of {x.bit_length()} bits"


_short = _Short()
_short.maxstring = _short.maxother = 60


def shown(value: Any) -> str:
    """`repr(value)` in one line, the middle or the end of what is long left out."""
    return " ".join(_short.repr(value).split())
