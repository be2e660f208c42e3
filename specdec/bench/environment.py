"""Where a benchmark ran: device, clocks, versions. What is not known is None, nothing is guessed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import specdec

_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.limit,persistence_mode,driver_version"


@dataclass(frozen=True)
class Environment:
    """device: its name; dtype: the weights', and the KV's if it is another; clocks: what nvidia-smi says of them, by its
    own field names; threads: of torch on the CPU.
    """

    device: str
    dtype: str
    graphs: bool
    compiled: bool
    threads: int
    cpus: int
    platform: str
    python: str
    versions: dict[str, str]
    clocks: dict[str, str]
    copy_bandwidth_gb_s: float


def environment(device: torch.device, dtype: str, graphs: bool, compiled: bool, bandwidth: float) -> Environment:
    """As it is now. bandwidth: bytes per second of a copy on `device`, read and written."""
    packages = ("torch", "triton", "transformers", "accelerate", "tokenizers", "numpy")
    return Environment(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        dtype=dtype,
        graphs=graphs,
        compiled=compiled,
        threads=torch.get_num_threads(),
        cpus=os.cpu_count() or 0,
        platform=platform.platform(),
        python=platform.python_version(),
        versions={"specdec": specdec.__version__, **{p: v for p in packages if (v := _version(p))}},
        clocks=_clocks(device) if device.type == "cuda" else {},
        copy_bandwidth_gb_s=round(bandwidth / 1e9, 2),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def _clocks(device: torch.device) -> dict[str, str]:
    """Empty where nvidia-smi is not there or does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--id={device.index or 0}", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in answer.stdout.split(",")]
    names = _CLOCKS.split(",")
    return dict(zip(names, values, strict=True)) if answer.returncode == 0 and len(values) == len(names) else {}
