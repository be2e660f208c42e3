"""A document as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from specdec.bench.document import Document, Result
from specdec.bench.statistics import Distribution, Interval, Spread

NOTES = (
    "× plain: median over runs, 95 % interval over prompts (of one batch: lowest and highest run); decode: steps "
    "without prompt work.",
    "Acceptance length: tokens per round and row, the bonus token included; plain decoding has 1.",
    "Milliseconds per token: the tokens of a round share its time; per step: between rounds, however many tokens came.",
)


def print_results(document: Document, console: Console) -> None:
    """Speed, speculation, break-even, what failed, what to know, and the losslessness line of every result."""
    if document.label:
        console.print(
            f"[bold reverse] {document.label} [/] acceptance was forced, nothing here says how well drafts fit"
        )
    if document.results:
        console.print(_speed(document), _speculation(document))
        for note in NOTES:
            console.print(f"[dim]{note}[/]")
        _losslessness(document, console)
    if document.break_even:
        console.print(_break_even(document))
    for failure in document.failures:
        where = "everywhere" if failure.batch == 0 else f"at batch {failure.batch}, {failure.workload}"
        console.print(f"[red]skipped[/] {failure.method} {where}: {failure.reason}", markup=True)
    for warning in document.warnings:
        console.print(f"[yellow]note[/] {warning}")
    if document.interrupted:
        console.print("[yellow]interrupted[/]: the figures are of what was measured until then")


def _speed(document: Document) -> Table:
    title = _title(document, "Speed")
    columns = (
        "decode tok/s",
        "× plain",
        "whole tok/s",
        "× plain",
        "first token ms",
        "ms per token 50/90/99 %",
        "per step",
    )
    table = _table(title, document, *columns, f"tok/s within {document.latency_target_ms:g} ms")
    for r in document.results:
        table.add_row(
            *_where(document, r),
            spread(r.decode_tok_s),
            interval(r.decode_speedup),
            spread(r.whole_tok_s),
            interval(r.whole_speedup),
            f"{r.ttft_ms.p50:.0f}",
            percentiles(r.itl_token_ms),
            percentiles(r.itl_step_ms),
            f"{r.goodput_tok_s:.0f}",
        )
    return table


def _speculation(document: Document) -> Table:
    columns = ("round ms", "draft/verify/sample/other/host/idle ms", "% of floor", "accept. length", "by position, %")
    table = _table(_title(document, "Rounds and drafts"), document, *columns, "wasted", "peak MB", "tokens")
    for r in document.results:
        table.add_row(
            *_where(document, r),
            "" if r.round_ms is None else f"{r.round_ms.median:.2f}",
            split_line(r),
            "" if r.floor is None else f"{r.floor.percent:.0f}",
            "" if r.acceptance is None else f"{r.acceptance.length:.2f}",
            "" if r.acceptance is None else " ".join(f"{100 * c:.0f}" for c in r.acceptance.conditional[:8]),
            "" if r.acceptance is None or not r.acceptance.drafted else f"{wasted(r):.0%}",
            f"{r.peak_bytes / 1e6:.0f}",
            tokens_word(r),
        )
    return table


def _break_even(document: Document) -> Table:
    table = Table("batch", "context", "method", "k", "drafts", "round × plain", title="Break-even", box=box.SIMPLE_HEAD)
    table.add_column("needs per-token acceptance")
    for b in document.break_even:
        never = b.length > b.k + 1
        needed = "never pays" if never else "" if b.alpha is None else f"{b.alpha:.2f}"
        table.add_row(str(b.batch), str(b.context), b.method, str(b.k), f"{b.depth:.1f}", f"{b.length:.2f}", needed)
    table.caption = "round × plain is also the acceptance length that is needed, bonus token included"
    return table


def _losslessness(document: Document, console: Console) -> None:
    """One line where all agree, else one for each method that does not."""
    judged = [r for r in document.results if r.losslessness is not None]
    bad = [r for r in judged if r.losslessness and r.losslessness.identical < r.losslessness.compared]
    for r in bad:
        assert r.losslessness is not None
        console.print(f"[red]tokens[/] {r.arm}, batch {r.batch}, temperature {r.temperature:g}: {r.losslessness.line}")
    if judged and not bad:
        compared = sum(r.losslessness.compared for r in judged if r.losslessness)
        console.print(f"[green]tokens[/] every method's are plain decoding's, {compared} requests compared")


def _title(document: Document, what: str) -> str:
    e = document.environment
    drafter = "" if document.drafter is None else f", drafter {document.drafter}"
    weights = ", random weights" if document.weights == "random" else ""
    label = f", {document.label}" if document.label else ""
    return f"{what}: {document.target}{drafter}{weights}, {e.dtype} on {e.device}{label}"


def _table(title: str, document: Document, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in _place(document):
        table.add_column(name, justify="right")
    table.add_column("method", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _place(document: Document) -> Iterable[str]:
    """The columns that tell points apart, those that vary and the batch."""
    yield "batch"
    if len({r.workload for r in document.results}) > 1:
        yield "context"
    if len({r.temperature for r in document.results}) > 1:
        yield "temp."


def _where(document: Document, r: Result) -> list[str]:
    values = {"batch": str(r.batch), "context": str(r.context), "temp.": f"{r.temperature:g}"}
    return [values[name] for name in _place(document)] + [r.arm]


def spread(s: Spread) -> str:
    """Median, and half of the range over runs in percent."""
    return f"{number(s.median)} ±{50 * s.relative:.0f}%" if len(s.values) > 1 else number(s.median)


def number(value: float) -> str:
    """Three digits or so, thousands with a comma."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def interval(i: Interval | None) -> str:
    return "" if i is None else f"{i.value:.2f} ({i.low:.2f}-{i.high:.2f})"


def percentiles(d: Distribution | None) -> str:
    return "" if d is None else f"{d.p50:.1f}/{d.p90:.1f}/{d.p99:.1f}"


def split_line(r: Result) -> str:
    s = r.split
    if s is None:
        return ""
    return "/".join(f"{v:.2f}" for v in (s.draft_ms, s.verify_ms, s.sample_ms, s.other_ms, s.host_ms, s.idle_ms))


def wasted(r: Result) -> float:
    """Share of drafted tokens that were verified for nothing."""
    return r.acceptance.wasted / r.acceptance.drafted if r.acceptance and r.acceptance.drafted else 0.0


def tokens_word(r: Result) -> str:
    loss = r.losslessness
    if loss is None:
        return ""
    return "identical" if loss.identical == loss.compared else f"{loss.compared - loss.identical} differ"
