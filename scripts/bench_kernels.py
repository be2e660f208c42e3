"""The kernels on a GPU: checked against fp64 first, then timed; a kernel whose check fails is not timed.

    python scripts/bench_kernels.py [--only grid,variants,prefill,store,sample] [--points TEXT] [--peers] [--sweep]

Prints tables, then one JSON line. Times are of CUDA-graph replays: `replay`, one call a graph, back to back, caches warm, as
the recorded figures of the peers (data/peers_kernels.json) were taken; `chain`, ten calls in a graph, as a model runs them;
`cold`, calls in turn over so many batches that no KV is left in L2 from the call before. A layer's call is timed with its
plan made, since a forward's layers share it; `plan` is what making it adds to the first one. `floor` is the bytes that must
move over the copy bandwidth of this run, `/FA3` the time times this bandwidth over the recorded time times the recorded one.

--peers times those that can be imported (FlashAttention-3, FlashInfer, SDPA, flex_attention) beside the grid; --sweep tries
launch configurations at each point and says which fixed ones would be best: the table in specdec/kernels/config.py is
chosen by it, no call ever is.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from pathlib import Path
from typing import Any

import kernel_sections as sections
import kernel_sweep
import torch
import triton
from kernel_timing import copy_bandwidth, matmul_rate


def main() -> None:
    arguments = parse()
    report: dict[str, Any] = dict(
        device=torch.cuda.get_device_name(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=triton.__version__,
        copy_gb_s=round(copy_bandwidth() / 1e9, 1),
        matmul_tflop_s=round(matmul_rate() / 1e12, 1),
    )
    print(", ".join(f"{name} {value}" for name, value in report.items()), flush=True)
    if arguments.sweep:
        report["sweep"] = kernel_sweep.run(report["copy_gb_s"] * 1e9, arguments.sweep, arguments.most)
    else:
        for name in arguments.only:
            report[name] = sections.SECTIONS[name](report, sections.Wanted(arguments.peers, arguments.points))
    if arguments.json:
        arguments.json.write_text(json.dumps(report))
    report.pop("sweep", None)  # thousands of numbers: for the file
    print(json.dumps(short(report), separators=(",", ":")))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(sections.SECTIONS), help=",".join(sections.SECTIONS)
    )
    parser.add_argument("--peers", action="store_true", help="time the peers that can be imported, too")
    parser.add_argument(
        "--points", default="", help='of grid and variants only those with this in their name: "8 x 8192"'
    )
    parser.add_argument(
        "--sweep", nargs="?", const="decode", choices=kernel_sweep.KINDS, help="try launch configurations"
    )
    parser.add_argument("--most", type=int, default=2**30, help="sweep only points of at most so many keys")
    parser.add_argument("--json", type=Path, help="write the full report to this file")
    return parser.parse_args()


def short(report: Any) -> Any:
    """The report with three significant digits: a line that a terminal can hold."""
    if isinstance(report, dict):
        return {name: short(value) for name, value in report.items()}
    if isinstance(report, list):
        return [short(value) for value in report]
    if isinstance(report, float) and math.isfinite(report) and report:
        return round(report, 2 - math.floor(math.log10(abs(report))))
    return report


if __name__ == "__main__":
    main()
