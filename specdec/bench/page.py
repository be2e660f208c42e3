"""A document as one HTML page that needs nothing else: no script, no request, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from specdec.bench.charts import FAINT, INK, SERIES, Chart
from specdec.bench.document import Document, Result
from specdec.bench.sheet import Sheet
from specdec.bench.statistics import Acceptance
from specdec.bench.table import (
    DRAFTS,
    LATENCY,
    MIXED_COLUMNS,
    SPEED,
    best_k,
    break_even,
    interval,
    mixed_cells,
    number,
    percentiles,
    places,
    shares,
    spread,
    tokens_word,
    wasted,
    where,
)

_DARK = (
    "#e5e7eb", "#3f4757",
    "#9ca3af", "#60a5fa", "#fbbf24", "#34d399", "#c084fc", "#f472b6", "#22d3ee", "#f59e0b", "#a3e635", "#fb7185",
    "#818cf8", "#ef4444", "#2dd4bf", "#ca8a04",
)  # fmt: skip
_CSS = """
:root { color-scheme: light dark; %(light)s --page: #ffffff; --panel: #f6f7f9; --bad: #b91c1c; --good: #047857; }
@media (prefers-color-scheme: dark) {
  :root { %(dark)s --page: #12151c; --panel: #1a1f29; --bad: #f87171; --good: #34d399; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--c0);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, ul { margin: .5rem 0; }
.label { background: #92400e; color: #fff; padding: .5rem .75rem; border-radius: .4rem; font-weight: 600; }
.big { display: flex; flex-wrap: wrap; gap: .75rem; padding: 0; list-style: none; }
.big li { background: var(--panel); border-radius: .5rem; padding: .75rem 1rem; flex: 1 1 11rem; }
.big strong { display: block; font-size: 1.6rem; line-height: 1.2; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%%, 22rem), 1fr));
  align-items: start; }
figure { margin: 0; padding: .5rem; background: var(--panel); border-radius: .5rem; }
figure svg { width: 100%%; height: auto; display: block; }
figcaption { font-size: .85rem; padding: .25rem .5rem; }
.scroll { overflow-x: auto; background: linear-gradient(to left, var(--page) 2rem, transparent) right / 3rem 100%% no-repeat
  local, linear-gradient(to left, var(--c1), transparent) right / 1rem 100%% no-repeat scroll; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--c1); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
.note { font-size: .85rem; max-width: 46rem; }
.good { color: var(--good); }
.bad { color: var(--bad); }
code { overflow-wrap: anywhere; }
dt { font-weight: 600; }
dd { margin: 0 0 .4rem; }
"""


def page(document: Document, charts: Sequence[Chart]) -> str:
    """The HTML. Its policy forbids whatever it would have to load."""
    title = _title(document)
    sections = [
        f"<h1>{escape(title)}</h1>",
        _label(document),
        _headline(document),
        _notices(document),
        f'<h2>Charts</h2><div class="charts">{"".join(map(_figure, charts))}</div>' if charts else "",
        _results(document),
        _mixed(document),
        _tokens(document),
        _break_even(document),
        _setting(document),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_style()}</style></head>'
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _style() -> str:
    light, dark = (
        " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours)) for colours in ((INK, FAINT, *SERIES), _DARK)
    )
    return _CSS % {"light": light, "dark": dark}


def _title(document: Document) -> str:
    drafter = f" with drafter {document.drafter}" if document.drafter else ""
    return f"{document.target}{drafter} on {document.environment.device}"


def _label(document: Document) -> str:
    parts = [document.label] if document.label else []
    parts += ["random weights"] if document.weights == "random" else []
    if document.label:
        parts.append("these figures show cost, not how well drafts fit")
    text = "; ".join(parts)
    return f'<p class="label">{escape(text[:1].upper() + text[1:])}</p>' if text else ""


def _headline(document: Document) -> str:
    """For each batch the fastest of our methods, in large type."""
    best: dict[tuple[int, int, float], Result] = {}
    for r in document.results:
        key, old = (r.batch, r.context, r.temperature), best.get((r.batch, r.context, r.temperature))
        if r.decode_speedup and r.method in ("lookup", "draft"):
            if old is None or old.decode_speedup is None or r.decode_speedup.value > old.decode_speedup.value:
                best[key] = r
    items = "".join(
        f"<li><strong>{r.decode_speedup.value:.2f}×</strong>plain decoding's speed with {escape(r.arm)} at batch {r.batch}"
        f"{_aside(document, r)}<br>{r.decode_speedup.low:.2f} to {r.decode_speedup.high:.2f}, "
        f"{'95 % interval over prompts' if r.decode_speedup.over == 'prompts' else 'lowest and highest run'}"
        f"{f', {escape(document.label)}' if document.label else ''}</li>"
        for r in best.values()
        if r.decode_speedup
    )
    return f'<ul class="big">{items}</ul>' if items else ""


def _aside(document: Document, r: Result) -> str:
    """What tells the point from others of its batch."""
    parts = [f", context {r.context}"] if len(document.workloads) > 1 else []
    parts += [f", T={r.temperature:g}"] if len({x.temperature for x in document.results}) > 1 else []
    return "".join(parts)


def _notices(document: Document) -> str:
    lines = [f"skipped: {f.method}, batch {f.batch or 'any'}, {f.workload}: {f.reason}" for f in document.failures]
    lines += ["interrupted: the figures are of what was measured until then"] if document.interrupted else []
    items = [f'<li class="bad">{escape(line)}</li>' for line in lines]
    items += [f"<li>{escape(line)}</li>" for line in document.warnings]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _figure(chart: Chart) -> str:
    return f"<figure>{chart.svg()}<figcaption>{escape(chart.caption)}</figcaption></figure>"


def _results(document: Document) -> str:
    """Three tables, so that each fits a screen."""
    good = f"tok/s within {document.latency_target_ms:g} ms"
    speed = ["decode tok/s", "× plain", "whole tok/s", "× plain", "first token ms", "tokens"]
    latency = ["ms per token", "ms per step", good, "round ms", "% of floor", "peak MB"]
    drafts = ["acceptance length", "accepted by position, %", "of all rounds, %", "wasted"]
    drafted = [r for r in document.results if r.acceptance and r.acceptance.drafted]
    parts = [
        ("Speed", SPEED, speed, [(r, _speed(r)) for r in document.results]),
        ("Latency (50/90/99 %) and memory", LATENCY, latency, [(r, _latency(r)) for r in document.results]),
        ("Drafts", DRAFTS, drafts, [(r, _drafts(r, r.acceptance)) for r in drafted if r.acceptance]),
    ]
    return "".join(
        f"<h2>{title}</h2>{_placed(document, names, rows)}{_note(note)}" for title, note, names, rows in parts if rows
    )


def _placed(document: Document, names: Sequence[str], rows: Sequence[tuple[Result, list[str]]]) -> str:
    """A table of results, each row beginning with its method and what tells points apart."""
    cells = [[(place := where(document, r))[-1], *place[:-1], *cells] for r, cells in rows]
    return _table(["method", *places(document), *names], cells)


def _speed(r: Result) -> list[str]:
    rates = spread(r.decode_tok_s), interval(r.decode_speedup), spread(r.whole_tok_s), interval(r.whole_speedup)
    return [*rates, number(r.ttft_ms.p50), tokens_word(r)]


def _latency(r: Result) -> list[str]:
    times = percentiles(r.itl_token_ms), percentiles(r.itl_step_ms), number(r.goodput_tok_s)
    of_round = f"{r.round_ms.median:.2f}" if r.round_ms else ""
    return [*times, of_round, f"{r.floor.percent:.0f}" if r.floor else "", f"{r.peak_bytes / 1e6:,.0f}"]


def _drafts(r: Result, acceptance: Acceptance) -> list[str]:
    positions = (shares(acceptance, of) for of in (acceptance.conditional, acceptance.unconditional))
    return [f"{acceptance.length:.2f}", *positions, f"{wasted(r):.0%}"]


def _mixed(document: Document) -> str:
    rows = [(r, [f"{r.mixed.prompt_len:,}", *mixed_cells(r.mixed)]) for r in document.results if r.mixed]
    names = ["arriving, tokens", *MIXED_COLUMNS]
    text = (
        "Prompts arrive one after another while the batch runs. First token: of those that arrive; the rest: of the "
        "batch, 50/90/99 %. Chunk: the most prompt tokens between two rounds, of the budget."
    )
    return f"<h2>Mixed load</h2><p>{text}</p>{_placed(document, names, rows)}" if rows else ""


def _tokens(document: Document) -> str:
    lines = []
    for r in document.results:
        if r.losslessness is not None:
            same = r.losslessness.identical == r.losslessness.compared
            where = f"{r.arm}, batch {r.batch}, context {r.context}, T={r.temperature:g}: {r.losslessness.line}"
            lines.append(f'<li class="{"good" if same else "bad"}">{escape(where)}</li>')
    return f"<h2>Tokens against plain decoding</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _break_even(document: Document) -> str:
    sheets = [sheet for sheet in (break_even(document), best_k(document)) if sheet and sheet.rows]
    return "".join(map(_sheet, sheets))


def _sheet(sheet: Sheet) -> str:
    return f"<h2>{sheet.title}</h2>{_table([*sheet.keys, *sheet.columns], sheet.rows)}{_note(sheet.caption or '')}"


def _note(text: str) -> str:
    """Below a table, how to read it."""
    return f'<p class="note">{escape(text[:1].upper() + text[1:])}.</p>'


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _setting(document: Document) -> str:
    e = document.environment
    facts = {
        "Command": "specdec " + " ".join(document.command),
        "When": document.created,
        "Device": f"{e.device}, {e.dtype}, copy bandwidth {e.copy_bandwidth_gb_s:g} GB/s",
        "Clocks": ", ".join(f"{name} {value}" for name, value in e.clocks.items()),
        "Engine": f"verifier {document.verifier}, graphs {'on' if e.graphs else 'off'}, "
        f"compiled layers {'on' if e.compiled else 'off'}",
        "Host": f"{e.platform}, {e.cpus} CPUs, {e.threads} threads, Python {e.python}",
        "Versions": ", ".join(f"{name} {version}" for name, version in e.versions.items()),
        "Prompts": "; ".join(
            f"{w.name}: {w.prompts}, median {w.input_len:g} tokens, sha256 {w.sha256}" for w in document.workloads
        ),
    }
    items = "".join(f"<dt>{escape(k)}</dt><dd><code>{escape(v)}</code></dd>" for k, v in facts.items() if v)
    return f"<h2>Setting</h2><dl>{items}</dl>"
