"""The command `specdec audit`: a report on standard output, exit status 1 if a level failed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import specdec.audit
from specdec.bench.command import UsageError


def audit(
    model: Annotated[
        str | None, typer.Argument(help="Alias, hub id, folder or .gguf file. Default: a built-in one.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="lookup or a model. Default: lookup.", show_default=False)] = None,
    verifier: Annotated[str, typer.Option(help="coupled, rejection or block.")] = "coupled",
    k: Annotated[int, typer.Option("--k", "-k", help="Drafted tokens per round.")] = 4,
    levels: Annotated[str, typer.Option(help="Of 0,1,2,3,4.")] = "0,1,2,3,4",
    requests: Annotated[
        int, typer.Option(help="Outputs compared at levels 2 and 3; level 4 takes four times as many.")
    ] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens per output.")] = 24,
    temperature: Annotated[float, typer.Option(help="Of level 4.")] = 1.0,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts: text, one a line, or *.jsonl.", show_default=False)
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Audit transformers' own assisted generation of MODEL.")
    ] = False,
    endpoint: Annotated[
        str | None, typer.Option(help="Audit a server with speculation: URL up to /v1.", show_default=False)
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The same model served without speculation.", show_default=False)
    ] = None,
    served: Annotated[
        str | None, typer.Option(help="The model's name at the servers. Default: their first.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Noise of a logit to allow for. Default: measured.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Compiled layers. Default: of a MODEL on a GPU.", show_default=False
        ),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Check that speculation changes nothing: here, in transformers, or between two servers."""
    try:
        settings = specdec.audit.Settings(
            model=model, drafter=drafter, verifier=verifier, k=k, levels=_levels(levels), requests=requests,
            tokens=tokens, temperature=temperature, prompts=prompts, dtype=dtype, device=device, compile=compile,
            trust_remote_code=trust_remote_code, transformers=transformers, endpoint=endpoint, baseline=baseline,
            served=served, tolerance=tolerance,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    console = Console(stderr=True)
    with console.status("audit") as status:
        report = specdec.audit.audit(settings, lambda text: status.update(f"audit: {text}"))
    if as_json:
        print(report.to_json())
    else:
        out = Console(highlight=False)
        specdec.audit.print_report(report, out if out.is_terminal else Console(highlight=False, width=160))
    sys.stdout.flush()
    raise typer.Exit(0 if report.passed else 1)


def _levels(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"levels: expected some of 0,1,2,3,4, got {text}") from None
