"""A document as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from specdec.bench.document import MOST_TASKS, Document, Result
from specdec.bench.mixed import MixedLoad
from specdec.bench.sheet import Sheet
from specdec.bench.statistics import FEW, Acceptance, Distribution, Interval, Spread

MIXED_COLUMNS = ("first token ms", "ms per token", "ms per step", "beside a prompt", "chunk, tokens")
SPEED = (
    "× plain: median over runs, 95 % interval over prompts (of one batch: lowest and highest run); decode: steps without "
    "prompt work"
)
LATENCY = (
    "per token: the tokens of a round share its time; per step: between rounds, however many tokens came; within "
    "so many ms: tokens of requests whose mean time per token, after the first round, is that short"
)
ROUNDS = (
    "of a pass of its own, scaled to the measured round; other: packing, bookkeeping; host: scheduler, detokenizer (GPU: "
    "what it waits for them); % of floor: reading weights and KV once at the copy bandwidth, of the round; 100 is best"
)
BREAK_EVEN = (
    "from the length needed on (tokens per round and row) a method beats plain decoding: it is its round's time over plain's. "
    "drafts needed: the share that must be accepted; per-token acceptance: each draft's, where all rounds draft k"
)
DRAFTS = (
    "acceptance length: tokens per round and row, the bonus token included, plain decoding has 1; wasted: of the drafts; "
    f"by position: of the rounds that accepted all drafts before it; positions that fewer than {FEW} rounds reached are "
    "left out"
)


def print_results(document: Document, console: Console) -> None:
    """Speed, tasks, latency, drafts, rounds, break-even, what failed, and whether every method's tokens are plain's."""
    console.print(f"[bold]{escape(_title(document))}[/]")
    if document.label:
        console.print(f"[bold reverse] {document.label} [/] forced: nothing here says how well drafts fit")
    if document.results:
        for sheet in (_speed, by_task, _latency, _drafts, _rounds, _mixed):
            if found := sheet(document):
                found.show(console)
        _losslessness(document, console)
    if document.break_even:
        break_even(document).show(console)
        if depths := best_k(document):
            depths.show(console)
    for failure in document.failures:
        where = "everywhere" if failure.batch == 0 else f"at batch {failure.batch}, {failure.workload}"
        console.print(f"[red]skipped[/] {failure.method} {escape(f'{where}: {failure.reason}')}")
    for warning in document.warnings:
        console.print(f"[yellow]note[/] {escape(warning)}")
    if document.interrupted:
        console.print("[yellow]interrupted[/]: the figures are of what was measured until then")


def _speed(document: Document) -> Sheet:
    sheet = _sheet("Speed", document, "decode tok/s", "× plain", "whole tok/s", "× plain", "first token ms")
    for r in document.results:
        cells = [spread(r.decode_tok_s), interval(r.decode_speedup), spread(r.whole_tok_s), interval(r.whole_speedup)]
        sheet.rows.append([*where(document, r), *cells, number(r.ttft_ms.p50)])
    sheet.caption = SPEED
    return sheet


def by_task(document: Document) -> Sheet | None:
    """At the smallest batch, where a drafter helps most; None where there is but one task, or only plain decoding."""
    smallest = [r for r in document.results if r.batch == min(r.batch for r in document.results)]
    plain = {r.point: r for r in smallest if r.method == "plain"}
    others = [r for r in smallest if r.method != "plain" and r.point in plain]
    speedups = [r.task_speedups(plain[r.point]) for r in others]
    tasks = list(dict.fromkeys(task for found in speedups for task in found))
    if len(tasks) < 2:
        return None
    sheet = _sheet("Speed of a request by task, × plain", document, *tasks)
    if (asked := max(len(r.tasks) for r in others)) > MOST_TASKS:
        sheet.caption = f"the {MOST_TASKS} most asked of {asked} tasks"
    for r, found in zip(others, speedups, strict=True):
        sheet.rows.append([*where(document, r), *(f"{found[task]:.2f}" if task in found else "" for task in tasks)])
    return sheet


def _latency(document: Document) -> Sheet:
    good = f"tok/s within {document.latency_target_ms:g} ms"
    sheet = _sheet("Latency, 50 / 90 / 99 %", document, "ms per token", "ms per step", good)
    for r in document.results:
        cells = [percentiles(r.itl_token_ms), percentiles(r.itl_step_ms), number(r.goodput_tok_s)]
        sheet.rows.append([*where(document, r), *cells])
    sheet.caption = LATENCY
    return sheet


def _drafts(document: Document) -> Sheet:
    sheet = _sheet("Drafts", document, "acceptance length", "accepted by position, %", "wasted", "tokens")
    sheet.caption = DRAFTS
    for r in document.results:
        if r.acceptance and r.acceptance.drafted:
            cells = [f"{r.acceptance.length:.2f}", shares(r.acceptance, r.acceptance.conditional)]
            sheet.rows.append([*where(document, r), *cells, f"{wasted(r):.0%}", tokens_word(r)])
    return sheet


def _rounds(document: Document) -> Sheet:
    parts = ("draft", "verify", "sample", "other", "host", "idle")
    sheet = _sheet("Rounds, ms", document, "round", *parts, "% of floor", "peak MB")
    for r in document.results:
        split = [f"{getattr(r.split, f'{part}_ms'):.2f}" if r.split else "" for part in parts]
        whole = f"{r.round_ms.median:.2f}" if r.round_ms else ""
        share = f"{r.floor.percent:.0f}" if r.floor else ""
        sheet.rows.append([*where(document, r), whole, *split, share, f"{r.peak_bytes / 1e6:,.0f}"])
    sheet.caption = ROUNDS
    return sheet


def _mixed(document: Document) -> Sheet | None:
    """None where mixed load was not measured."""
    loads = [(r, r.mixed) for r in document.results if r.mixed]
    if not loads:
        return None
    _, first = loads[0]
    title = (
        f"Mixed load, 50 / 90 / 99 %: {first.arrivals} prompts of {first.prompt_len:,} tokens arrive while a batch runs"
    )
    sheet = _sheet(title, document, *MIXED_COLUMNS)
    sheet.rows += [[*where(document, r), *mixed_cells(load)] for r, load in loads]
    return sheet


def mixed_cells(load: MixedLoad) -> list[str]:
    """Under MIXED_COLUMNS."""
    spreads = load.ttft_ms, load.itl_token_ms, load.quiet_step_ms, load.busy_step_ms
    return [*map(percentiles, spreads), f"{load.largest_chunk:,} of {load.prompt_budget:,}"]


def break_even(document: Document) -> Sheet:
    """What each method needs, and what it had."""
    columns = ("drafts a round", "length needed", "length measured", "drafts needed", "per-token acceptance")
    sheet = Sheet("Break-even", ("batch", "context", "method"), columns)
    sheet.caption = BREAK_EVEN
    lengths = {(r.method, r.k, r.batch, r.context): r.acceptance.length for r in document.results[::-1] if r.acceptance}
    for b in document.break_even:
        measured = lengths.get((b.method, b.k, b.batch, b.context))
        cells = [f"{b.depth:.1f}", f"{b.length:.2f}", "" if measured is None else f"{measured:.2f}"]
        cells += ["never pays"] * 2 if b.share > 1 else [f"{b.share:.0%}", "–" if b.alpha is None else f"{b.alpha:.2f}"]
        sheet.rows.append([str(b.batch), str(b.context), f"{b.method} k={b.k}", *cells])
    return sheet


def best_k(document: Document) -> Sheet | None:
    """The depths that pay, a column for each acceptance; None where no method's rounds drafted all they could."""
    alphas = list(dict.fromkeys(b.alpha for b in document.best_depths))
    loads: dict[tuple[str, str, str], dict[float, str]] = {}
    for b in document.best_depths:
        cells = loads.setdefault((str(b.batch), str(b.context), b.method), {})
        cells[b.alpha] = f"k={b.k}, {b.speedup:.2f}×" if b.k else "none"
    if not loads:
        return None
    sheet = Sheet("Which k pays", ("batch", "context", "method"), [f"{alpha:g}" for alpha in alphas])
    sheet.rows += [[*load, *(cells[alpha] for alpha in alphas)] for load, cells in loads.items()]
    sheet.caption = "the measured k that gains most and its gain over plain, for drafts of this acceptance per token"
    return sheet


def _losslessness(document: Document, console: Console) -> None:
    """One line where all agree, else one for each method that does not."""
    judged = [r for r in document.results if r.losslessness is not None]
    bad = [r for r in judged if r.losslessness and r.losslessness.identical < r.losslessness.compared]
    for r in bad:
        assert r.losslessness is not None
        console.print(f"[red]tokens[/] {r.arm}, batch {r.batch}, temperature {r.temperature:g}: {r.losslessness.line}")
    if judged and not bad:
        compared = sum(r.losslessness.compared for r in judged if r.losslessness)
        console.print(f"[green]tokens[/] every method's are the same as plain decoding's, {compared} requests compared")


def _title(document: Document) -> str:
    drafter = "" if document.drafter is None else f", drafter {document.drafter}"
    weights = ", random weights" if document.weights == "random" else ""
    verifier = "" if document.verifier == "coupled" else f", verifier {document.verifier}"
    return (
        f"{document.target}{drafter}{weights}{verifier}, {document.environment.dtype} on {document.environment.device}"
    )


def _sheet(title: str, document: Document, *columns: str) -> Sheet:
    """Its title carries the label, so that no table is quoted without it."""
    title += f" ({document.label})" if document.label else ""
    return Sheet(title, [*places(document), "method"], columns)


def places(document: Document) -> Iterable[str]:
    """The columns that tell points apart, those that vary and the batch."""
    yield "batch"
    if len({r.workload for r in document.results}) > 1:
        yield "context"
    if len({r.temperature for r in document.results}) > 1:
        yield "temp."


def where(document: Document, r: Result) -> list[str]:
    """Under `places`, and the method."""
    values = {"batch": str(r.batch), "context": str(r.context), "temp.": f"{r.temperature:g}"}
    return [values[name] for name in places(document)] + [r.arm]


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


def wasted(r: Result) -> float:
    """Share of drafted tokens that were verified for nothing."""
    return r.acceptance.wasted / r.acceptance.drafted if r.acceptance and r.acceptance.drafted else 0.0


def shares(acceptance: Acceptance, of: list[float]) -> str:
    """Percents by position, at most ten, as far as there are samples."""
    return " ".join(f"{100 * share:.0f}" for share in of[: min(10, acceptance.sure)]) or "few"


def tokens_word(r: Result) -> str:
    loss = r.losslessness
    if loss is None:
        return ""
    return "identical" if loss.identical == loss.compared else f"{loss.compared - loss.identical} differ"
