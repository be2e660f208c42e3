"""The charts of a document, drawn once: each figure is saved as SVG for the page and as PNG.

Needs matplotlib (the extra `bench`). Figures are narrow, so that a phone shows their text at its own size.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

from specdec.bench.breakeven import BreakEven
from specdec.bench.document import Document, Result
from specdec.bench.statistics import CURVE, FEW, Distribution

INK, FAINT = "#1f2430", "#c9ced8"
SERIES = (
    "#6b7280", "#2563eb", "#d97706", "#059669", "#9333ea", "#db2777", "#0891b2", "#b45309", "#4d7c0f", "#be123c",
    "#1e3a8a", "#ef4444", "#0d9488", "#713f12",
)  # fmt: skip
"""Colours of the methods, plain first. The page replaces each by a variable, so that dark mode has its own."""
_BARS = {"prompts": "95 % interval over prompts", "runs": "lowest to highest run (batches of one set of prompts)"}
PARTS = ("draft", "verify", "sample", "other", "host", "idle")
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "svg.hashsalt": "specdec",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True)
class Chart:
    """name: its file, without a suffix; caption: how to read it, one or two sentences."""

    name: str
    title: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        """An `svg` element to stand in a page: no header, ids of its own, its size left to the page."""
        text = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return _inline(text.getvalue(), self.name, self.title)

    def png(self) -> bytes:
        data = io.BytesIO()
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(data, format="png", dpi=200, facecolor="white")
        return data.getvalue()


def charts(document: Document) -> list[Chart]:
    """Every chart that the document has figures for. Controlled acceptance is written into each title."""
    with matplotlib.rc_context(_STYLE):
        drawn = (_speedups, _acceptance, _latency, _mixed, _rounds, _maps)
        return [chart for draw in drawn for chart in draw(document)]


# -- speed


def _speedups(document: Document) -> Iterator[Chart]:
    for name, results in _groups(document):
        arms = [arm for arm in _arms(results) if any(r.arm == arm and r.decode_speedup for r in results)]
        if not arms:
            continue
        figure, axes = _figure(document, f"Decoding speed over plain{name.title}")
        batches = sorted({r.batch for r in results})
        for i, arm in enumerate(arms):
            aside = 0.05 * (i - (len(arms) - 1) / 2)  # so that intervals stand beside each other
            _speedup_line(axes, [r for r in results if r.arm == arm], batches, aside, _colour(document, arm))
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(batches)), [str(b) for b in batches])
        axes.set(xlabel="batch (requests at once)", ylabel="× plain")
        axes.set_xlim(-0.5, len(batches) - 0.5)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        _legend(axes)
        kinds = dict.fromkeys(r.decode_speedup.over for r in results if r.decode_speedup)
        bars = " or ".join(_BARS[kind] for kind in kinds)
        caption = f"Decode tokens per second over plain decoding's in the same process. Bars: {bars}."
        yield Chart(f"speedup{name.suffix}", axes.get_title(), caption, figure)
    yield from _tasks(document)


def _speedup_line(axes: Axes, results: list[Result], batches: list[int], aside: float, colour: str) -> None:
    found = [(batches.index(r.batch), r.decode_speedup) for r in results if r.decode_speedup]
    x, y = [i + aside for i, _ in found], [s.value for _, s in found]
    error = [[s.value - s.low for _, s in found], [s.high - s.value for _, s in found]]
    axes.errorbar(
        x, y, yerr=error, color=colour, marker="o", markersize=4, capsize=2, elinewidth=0.8, label=results[0].arm
    )


def _tasks(document: Document) -> Iterator[Chart]:
    """Speed of each task over plain's, at the smallest batch: where a drafter helps and where it does not."""
    for name, results in _groups(document):
        smallest = [r for r in results if r.batch == min(r.batch for r in results)]
        plain = next((r for r in smallest if r.method == "plain"), None)
        others = [r for r in smallest if r.method != "plain"]
        if plain is None or not others or len(plain.tasks) < 2:
            continue
        tasks = list(plain.task_speedups(plain))
        figure, axes = _figure(document, f"Speed by task{name.title}", height=1.0 + 0.42 * len(tasks))
        for r in others:
            ratios = [r.task_speedups(plain)[task] for task in tasks]
            axes.plot(ratios, range(len(ratios)), "o", color=_colour(document, r.arm), label=r.arm, markersize=5)
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(tasks)), [task if len(task) <= 20 else f"{task[:19]}…" for task in tasks])
        axes.set_xlim(left=0)
        axes.invert_yaxis()
        axes.set_xlabel("× plain")
        axes.grid(axis="x")
        _legend(axes)
        caption = f"Median tokens per second of a request over plain's, at batch {plain.batch}."
        yield Chart(f"tasks{name.suffix}", axes.get_title(), caption, figure)


# -- acceptance


def _acceptance(document: Document) -> Iterator[Chart]:
    for name, results in _groups(document):
        smallest = min(r.batch for r in results)
        drafted = [r for r in results if r.batch == smallest and r.acceptance and r.acceptance.sure]
        if not drafted:
            continue
        figure, axes = _figure(document, f"Acceptance by position{name.title}")
        for r in drafted:
            _positions(axes, r, _colour(document, r.arm))
        axes.set(xlabel="position of the draft", ylabel="accepted, %", ylim=(0, 105))
        axes.set_xlim(0.5, max(r.acceptance.sure for r in drafted if r.acceptance) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(axis="y")
        _legend(axes)
        caption = (
            "Solid: given that all earlier drafts of the round were accepted. Dashed: of all rounds that drafted it. "
            f"As far as {FEW} rounds reached."
        )
        yield Chart(f"acceptance{name.suffix}", axes.get_title(), caption, figure)
        yield _histogram(document, drafted, name)


def _positions(axes: Axes, r: Result, colour: str) -> None:
    assert r.acceptance is not None
    known = r.acceptance.sure
    given, all_rounds = ([100 * v for v in of[:known]] for of in (r.acceptance.conditional, r.acceptance.unconditional))
    x = range(1, known + 1)
    axes.plot(x, given, color=colour, marker="o", markersize=3, label=r.arm)
    axes.plot(x, all_rounds, color=colour, linestyle="--", linewidth=1)


def _histogram(document: Document, drafted: list[Result], name: _Group) -> Chart:
    figure, axes = _figure(document, f"Tokens per round{name.title}")
    width = 0.8 / len(drafted)
    for i, r in enumerate(drafted):
        assert r.acceptance is not None
        share = [100 * n / r.acceptance.rounds for n in r.acceptance.histogram]
        x = [j + 1 + (i - (len(drafted) - 1) / 2) * width for j in range(len(share))]
        label = f"{r.arm} (mean {r.acceptance.length:.2f})"
        axes.bar(x, share, width, color=_colour(document, r.arm), label=label)
    axes.set(xlabel="tokens of a round, the bonus token included", ylabel="rounds, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    _legend(axes, columns=1)
    caption = "How often a round brought how many tokens (accepted drafts and one more). Plain decoding brings one."
    return Chart(f"histogram{name.suffix}", axes.get_title(), caption, figure)


# -- latency


def _latency(document: Document) -> Iterator[Chart]:
    for name, results in _groups(document):
        for batch in sorted({min(r.batch for r in results), max(r.batch for r in results)}):
            shown = [r for r in results if r.batch == batch and r.itl_token_ms and r.itl_step_ms]
            if not shown:
                continue
            figure, axes = _figure(document, f"Time between tokens, batch {batch}{name.title}")
            for r in shown:
                assert r.itl_token_ms is not None and r.itl_step_ms is not None
                colour = _colour(document, r.arm)
                _curve(axes, r.itl_token_ms, color=colour, label=r.arm)
                _curve(axes, r.itl_step_ms, color=colour, linestyle="--", linewidth=1)
            _milliseconds(axes)
            caption = (
                "Solid: per token, the tokens of a round sharing its time. Dashed: per step, how long nothing new comes. "
                "Further left is better."
            )
            yield Chart(f"latency-{batch}{name.suffix}", axes.get_title(), caption, figure)


def _mixed(document: Document) -> Iterator[Chart]:
    """At the largest batch: where most rows wait for a prompt."""
    for name, results in _groups(document):
        shown = [(r, r.mixed) for r in results if r.mixed and r.batch == max(x.batch for x in results if x.mixed)]
        if not shown:
            continue
        r, load = shown[0]
        figure, axes = _figure(document, f"Steps while prompts arrive, batch {r.batch}{name.title}")
        for r, load in shown:
            colour = _colour(document, r.arm)
            if load.busy_step_ms:
                _curve(axes, load.busy_step_ms, color=colour, label=r.arm)
            if load.quiet_step_ms:
                _curve(axes, load.quiet_step_ms, color=colour, linestyle="--", linewidth=1)
        _milliseconds(axes)
        caption = (
            f"Solid: steps of the running requests beside a prompt of {load.prompt_len:,} tokens that arrived, of which at "
            f"most {load.prompt_budget:,} are extended between two rounds. Dashed: steps without."
        )
        yield Chart(f"mixed{name.suffix}", axes.get_title(), caption, figure)


def _milliseconds(axes: Axes) -> None:
    """Axes and legend of distributions."""
    axes.set(xlabel="milliseconds", ylabel="at most so long, %", xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid()
    _legend(axes)


def _curve(axes: Axes, distribution: Distribution, **style: object) -> None:
    axes.plot(distribution.curve, [100 * q for q in CURVE], **style)  # type: ignore[arg-type]


# -- rounds and break-even


def _rounds(document: Document) -> Iterator[Chart]:
    for name, results in _groups(document):
        ends = {min(r.batch for r in results), max(r.batch for r in results)}
        shown = [r for r in results if r.split and r.batch in ends]
        if not shown:
            continue
        figure, axes = _figure(document, f"Where a round's time goes{name.title}", height=1.2 + 0.26 * len(shown))
        left = [0.0] * len(shown)
        for part, colour in zip(PARTS, SERIES[1:], strict=False):
            widths = [getattr(r.split, f"{part}_ms") for r in shown]
            if any(widths):
                axes.barh(range(len(shown)), widths, left=left, color=colour, label=part, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(shown)), [f"{r.arm}, batch {r.batch}" for r in shown])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds per round")
        axes.grid(axis="x")
        _legend(axes, columns=3)
        caption = (
            "Measured in a pass of its own. other: packing, acceptance, bookkeeping; idle: the device waits (GPU)."
        )
        yield Chart(f"rounds{name.suffix}", axes.get_title(), caption, figure)


def _maps(document: Document) -> Iterator[Chart]:
    """One map for each method: loads across, depths down. A single cell is no map; the table has it."""
    for method in dict.fromkeys(b.method for b in document.break_even):
        mine = [b for b in document.break_even if b.method == method]
        if len(mine) < 2:
            continue
        loads = sorted({(b.context, b.batch) for b in mine})
        ks = sorted({b.k for b in mine}, key=lambda k: (k == "auto", k))
        figure, axes = _figure(document, f"Break-even of {method}", height=1.3 + 0.32 * len(ks))
        for b in mine:
            _cell(axes, loads.index((b.context, b.batch)), ks.index(b.k), b)
        axes.set_xlim(-0.5, len(loads) - 0.5)
        axes.set_ylim(len(ks) - 0.5, -0.5)
        several = len({context for context, _ in loads}) > 1
        axes.set_xticks(range(len(loads)), [f"{b}\nat {c}" if several else str(b) for c, b in loads])
        axes.set_yticks(range(len(ks)), [str(k) for k in ks])
        axes.set(xlabel="batch" + (" at context" if several else ""), ylabel="k")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        caption = (
            "Acceptance length (bonus included) from which on a round beats plain decoding, from measured round times. "
            "Green: few of its drafts must be accepted; red: nearly all; grey: even all are not enough."
        )
        yield Chart(f"break-even-{method}", axes.get_title(), caption, figure)


def _cell(axes: Axes, x: int, y: int, b: BreakEven) -> None:
    colour = "#9ca3af" if b.share > 1 else matplotlib.colormaps["RdYlGn_r"](0.1 + 0.8 * b.share)
    axes.bar(x, 0.94, 0.94, bottom=y - 0.47, color=colour)
    axes.text(x, y, f"{b.length:.2f}", ha="center", va="center", color="#111827", fontsize=9)


# -- what the charts share


@dataclass(frozen=True)
class _Group:
    """Results of one workload and temperature; title and suffix tell it from the others, empty if it is the only one."""

    title: str
    suffix: str


def _groups(document: Document) -> Iterator[tuple[_Group, list[Result]]]:
    keys = list(dict.fromkeys((r.context, r.temperature) for r in document.results))
    for context, temperature in keys:
        group = _Group("", "")
        if len(keys) > 1:
            group = _Group(f"\ncontext {context}, T={temperature:g}", f"-{context}-{temperature:g}")
        yield group, [r for r in document.results if (r.context, r.temperature) == (context, temperature)]


def _arms(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(r.arm for r in results))


def _colour(document: Document, arm: str) -> str:
    """The same for a method in every chart."""
    return SERIES[_arms(document.results).index(arm) % len(SERIES)]


def _figure(document: Document, title: str, height: float = 3.0) -> tuple[Figure, Axes]:
    title += f"\n{document.label}" if document.label else ""
    figure = Figure(figsize=(4.0, height + 0.17 * title.count("\n")), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _legend(axes: Axes, columns: int = 2) -> None:
    """Below the axes, which keep their height however many lines it takes."""
    rows, figure = -(-len(axes.get_legend_handles_labels()[1]) // columns), axes.get_figure(root=True)
    assert figure is not None, "axes that are drawn are in a figure"
    figure.set_figheight(figure.get_figheight() + 0.18 * max(0, rows - 2))
    figure.legend(loc="outside lower left", ncols=columns)


def _inline(svg: str, name: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # an element of an HTML page needs no namespaces
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    for i, colour in enumerate((INK, FAINT, *SERIES)):
        svg = svg.replace(colour, f"var(--c{i})")
    label = escape(" ".join(title.split()))
    head = re.match(r"<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", svg)
    assert head is not None, "matplotlib writes a viewBox"
    return f'<svg viewBox="{head[1]}" role="img" aria-label="{label}">' + svg[head.end() :]
