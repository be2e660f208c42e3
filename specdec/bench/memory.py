"""The most memory that was held between two moments: torch's on a GPU, the process's on a CPU."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

_PROC = Path("/proc/self")


def synchronize(device: torch.device) -> None:
    """Wait for what `device` has been given; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Start anew. Where Linux doesn't let a process do so, its peak remains that of its whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        (_PROC / "clear_refs").write_text("5")  # proc(5): resets VmHWM to what is held now
    except OSError:
        return


def peak_bytes(device: torch.device) -> int:
    """The most that was held since `reset_peak`: tensors of torch on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = _PROC / "status"
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if found:
        return 1024 * int(found[1])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
