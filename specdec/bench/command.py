"""The commands `specdec bench` and `specdec compare`: options in, tables on standard output, the rest on standard error."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import specdec.bench
from specdec.bench.settings import LENGTHS, Settings, depths, names, numbers, reals

# typer brings click or carries its own copy of it, by version; the error has the same name in both.
UsageError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "UsageError")


def bench(
    target: Annotated[str, typer.Argument(help="Alias, hub id, folder or .gguf file; with --random-weights a shape.")],
    drafter: Annotated[
        str | None, typer.Option(help="A draft model, for the method draft.", show_default=False)
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Of plain,lookup,draft. Default: all there is a drafter for.", show_default=False)
    ] = None,
    batch: Annotated[str, typer.Option(help="Requests at once, such as 1,4,16.")] = "1",
    k: Annotated[str, typer.Option("--k", "-k", help="Drafted tokens per round, such as auto or 1,2,4,8.")] = "auto",
    verifier: Annotated[str, typer.Option(help="coupled, rejection or block.")] = "coupled",
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file: text, *.jsonl, ShareGPT. Default: a set that ships.", show_default=False),
    ] = None,
    input_len: Annotated[
        str | None, typer.Option(help="Random prompts of so many tokens instead.", show_default=False)
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="The same for several lengths, such as 1k,8k,32k.", show_default=False)
    ] = None,
    output_len: Annotated[int, typer.Option(help="Tokens per request, at most (random prompts: exactly).")] = 128,
    limit: Annotated[
        int | None,
        typer.Option(
            help="So many prompts. Default: all; of those that ship 7 on a CPU; of random ones a batch.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[str, typer.Option(help="0 is greedy; such as 0,1.")] = "0",
    runs: Annotated[int, typer.Option(help="Measured repetitions after the warm-up.")] = 3,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Decode past the end token.")] = False,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Build the models from shapes (llama-8b) or a config.json.")
    ] = False,
    synthetic_acceptance: Annotated[
        float | None, typer.Option(help="Force this acceptance length, bonus included.", show_default=False)
    ] = None,
    mixed: Annotated[
        str | None,
        typer.Option(
            help="Also: prompts of so many tokens, such as 4k, arrive while a batch runs.", show_default=False
        ),
    ] = None,
    against: Annotated[str | None, typer.Option(help="An outside baseline: transformers.", show_default=False)] = None,
    latency_target: Annotated[float, typer.Option(help="Milliseconds per token that count as good.")] = 50.0,
    prompt_budget: Annotated[int, typer.Option(help="Prompt tokens between two rounds.")] = 512,
    graphs: Annotated[bool | None, typer.Option(help="CUDA graphs. Default: on a GPU.")] = None,
    compile: Annotated[bool | None, typer.Option(help="Compiled layers. Default: on a GPU.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache: auto (the model's dtype) or fp8.")] = "auto",
    kv_scales: Annotated[
        Path | None, typer.Option(help="For fp8, a file of KVScales.save. Default: calibrated.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of random prompts and of sampling.")] = 0,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.", show_default=False)] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a page with charts to this folder.", show_default=False)
    ] = None,
) -> None:
    """Measure speculative decoding against plain decoding: speed, latency, acceptance, losslessness."""
    if input_len is not None and context is not None:
        raise UsageError("--input-len and --context say the same; give one of them")
    if against not in (None, "transformers"):
        raise UsageError(f"against: expected transformers, got {against}")
    _check_output(json, report)
    lengths = context if input_len is None else input_len
    everything = "plain,lookup" if drafter is None else "plain,lookup,draft"
    settings = _usage(
        lambda: Settings(
            target=target, drafter=drafter, methods=names(everything if methods is None else methods),
            batch=numbers("batch", batch), k=depths(k), verifier=verifier, temperatures=reals("temperature", temperature),
            prompts=prompts, input_lens=() if lengths is None else numbers(LENGTHS, lengths),
            output_len=output_len, limit=limit, runs=runs, acceptance_length=synthetic_acceptance,
            random_weights=random_weights, mixed_len=_one_length(mixed), against=against is not None, ignore_eos=ignore_eos,
            latency_target_ms=latency_target, prompt_budget=prompt_budget,
            graphs="auto" if graphs is None else graphs, compile="auto" if compile is None else compile,
            dtype=dtype, kv_dtype=kv_dtype, kv_scales=kv_scales, device=device, seed=seed, trust_remote_code=trust_remote_code,
        )
    )  # fmt: skip
    document = _measured(settings, partial(_keep, json))
    try:  # files first: whoever reads standard output may stop reading
        _write(json, document)
        if report is not None:
            written = specdec.bench.write_report(document, report)
            print(f"specdec: report written to {written}", file=sys.stderr)
    finally:
        specdec.bench.print_results(document, _console())
    raise typer.Exit(130 if document.interrupted else 0 if document.results else 1)


def compare(
    before: Annotated[Path, typer.Argument(help="JSON of specdec bench.")],
    after: Annotated[Path, typer.Argument(help="JSON of specdec bench.")],
) -> None:
    """Compare two benchmarks: the change of each figure beside its noise."""
    first, second = (_usage(partial(specdec.bench.read_document, path)) for path in (before, after))
    specdec.bench.print_comparison(first, second, _console())


def _one_length(text: str | None) -> int | None:
    if text is None:
        return None
    first, *more = numbers("mixed", text)
    if more:
        raise ValueError(f"mixed: expected one number of tokens, such as 4k, got {text!r}")
    return first


def _is_plain(file: Path) -> bool:
    """Not a pipe, to which a document goes once."""
    return file.is_file() or not file.exists()


def _keep(file: Path | None, document: Any) -> None:
    """Write what was measured so far. A disk that is full now may not be at the end, and figures are worth more."""
    if file is not None and _is_plain(file):
        with suppress(OSError):
            _write(file, document)


def _write(file: Path | None, document: Any) -> None:
    """A plain file takes the place of an older one when it is whole."""
    if file is None:
        return
    text = document.to_json()
    if not (_is_plain(file) and os.access(file.parent, os.W_OK)):
        file.write_text(text, encoding="utf-8")
        return
    file = file.resolve()
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _measured(settings: Settings, keep: Callable[[Any], None]) -> Any:
    """The document, shown as it grows by a bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar, _terminable():
        task = bar.add_task("", total=1.0)
        benchmark = specdec.bench.Benchmark(
            settings, sys.argv[1:], lambda text, share: bar.update(task, description=text, completed=share), keep
        )
        try:
            return benchmark.run()
        finally:
            benchmark.close()


@contextmanager
def _terminable() -> Iterator[None]:
    """Within it SIGTERM, as batch systems send it before they kill, ends a benchmark as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_output(json: Path | None, report: Path | None) -> None:
    """Complain before measuring, not after."""
    if report is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("report: it needs matplotlib: pip install 'specdec[bench]'")
    if json is not None and not json.parent.is_dir():
        raise UsageError(f"json: expected a file in a folder that is there, got {json}")
    if json is not None and (_is_plain(json) or json.is_dir()):
        _check_file(json)
    if report is not None and report.exists() and not report.is_dir():
        raise UsageError(f"report: expected a folder, got the file {report}")
    if report is not None:
        try:
            report.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"report: expected a folder that can be written, got {report}: {error.strerror}"
            ) from error


def _check_file(json: Path) -> None:
    """By opening it: permissions alone don't tell."""
    there = json.exists()
    try:
        json.open("ab").close()
    except OSError as error:
        raise UsageError(f"json: expected a file that can be written, got {json}: {error.strerror}") from error
    if not there:
        json.unlink()


def _console() -> Console:
    """Standard output; wide enough for the tables when it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def _usage(make: Callable[[], Any]) -> Any:
    """`make()`, its complaint about a value being one about the command line."""
    try:
        return make()
    except (TypeError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error
