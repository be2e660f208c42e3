"""What people are told when something goes wrong: warnings that name the line of their code that led to them, not one of
ours, and where an exception came from.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from pathlib import Path

import torch
import transformers

DEBUG = os.environ.get("SPECDEC_DEBUG", "") == "1"

_FOLDERS = [Path(file).parent for file in (__file__, torch.__file__, transformers.__file__)]
_NOBODYS = (*(f"{folder}{os.sep}" for folder in _FOLDERS), threading.__file__)
"""Where frames are of no user's code."""


def advise(message: str) -> None:
    """Warn with UserWarning at the innermost frame outside of specdec, torch and transformers; else at the caller's."""
    frame, level = sys._getframe(1), 2
    while frame and frame.f_code.co_filename.startswith(_NOBODYS):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    warnings.warn(message, stacklevel=level if frame else 2)


def told(error: Exception) -> str:
    """An exception and the line that raised it; all of its traceback with SPECDEC_DEBUG=1."""
    if DEBUG:
        return "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    return f"{error!r}" + (f" in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}" if frames else "")
