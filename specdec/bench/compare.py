"""Two benchmarks side by side: the change of each figure beside its noise, and what else differs between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from specdec.bench.document import Document, Result
from specdec.bench.sheet import Sheet
from specdec.bench.statistics import Change

Key = tuple[str, int, int, float, int | str]
_WORDS = {"more": "[green]faster[/]", "less": "[red]slower[/]"}


@dataclass(frozen=True)
class Row:
    """One method at one point in both documents."""

    before: Result
    after: Result

    @property
    def decode(self) -> Change | None:
        return _change(self.before.decode_tok_s.values, self.after.decode_tok_s.values)

    @property
    def whole(self) -> Change | None:
        return _change(self.before.whole_tok_s.values, self.after.whole_tok_s.values)


def pairs(before: Document, after: Document) -> list[Row]:
    """The methods and points that both have, in the order of `before`. The workload counts by its context length."""
    found = {_key(r): r for r in after.results}
    return [Row(r, found[_key(r)]) for r in before.results if _key(r) in found]


def differences(before: Document, after: Document) -> Iterator[str]:
    """What makes the comparison unfair, or tells what changed: device, versions, prompts, acceptance."""
    a, b = before.environment, after.environment
    sides = [
        ("device", a.device, b.device),
        ("dtype", a.dtype, b.dtype),
        ("graphs", a.graphs, b.graphs),
        ("compiled layers", a.compiled, b.compiled),
        ("threads", a.threads, b.threads),
        ("target", before.target, after.target),
        ("drafter", before.drafter, after.drafter),
        ("weights", before.weights, after.weights),
        ("acceptance", before.label or "measured", after.label or "measured"),
        ("verifier", before.verifier, after.verifier),
        ("prompts", [w.sha256[:12] for w in before.workloads], [w.sha256[:12] for w in after.workloads]),
        ("output length", before.settings.get("output_len"), after.settings.get("output_len")),
    ]
    names = sorted(a.versions.keys() | b.versions.keys())
    sides += [(name, a.versions.get(name), b.versions.get(name)) for name in names]
    yield from (f"{name}: {x} / {y}" for name, x, y in sides if x != y)


def print_comparison(before: Document, after: Document, console: Console) -> None:
    """A table of changes. noise: half the width of the 95 % interval of the change (Welch's t over runs)."""
    rows = pairs(before, after)
    places = [("batch", "context", "temp.")[i] for i in _varying(rows)]
    columns = (
        "decode tok/s",
        "change",
        "noise",
        "verdict",
        "whole tok/s",
        "change",
        "noise",
        "verdict",
        "accept. length",
    )
    if rows:
        cells = [[_place(row)[i] for i in _varying(rows)] + _cells(row) for row in rows]
        Sheet("Change from the first file to the second", [*places, "method"], columns, cells).show(console)
    else:
        console.print("no method was measured at the same batch, context and temperature in both files")
    for text in differences(before, after):
        console.print(f"[yellow]differs[/] {escape(text)}")
    for name, mine, other in [("first", before, after), ("second", after, before)]:
        for text in _unmatched(mine, other):
            console.print(f"only in the {name} file: {text}")
    if any(len(r.whole_tok_s.values) == 1 for row in rows for r in (row.before, row.after)):
        console.print("[yellow]note[/] a single run has no noise to compare with: use --runs 3 or more")


def _place(row: Row) -> list[str]:
    return [str(row.before.batch), str(row.before.context), f"{row.before.temperature:g}"]


def _varying(rows: list[Row]) -> list[int]:
    """Which parts of the place tell rows apart; the batch always."""
    return [i for i in range(3) if i == 0 or len({_place(row)[i] for row in rows}) > 1]


def _cells(row: Row) -> list[str]:
    a, b = row.before, row.after
    lengths = [r.acceptance.length for r in (a, b) if r.acceptance]
    decode, whole = row.decode, row.whole
    return [
        a.arm,
        f"{a.decode_tok_s.median:.1f} → {b.decode_tok_s.median:.1f}",
        *_words(decode),
        f"{a.whole_tok_s.median:.1f} → {b.whole_tok_s.median:.1f}",
        *_words(whole),
        " → ".join(f"{length:.2f}" for length in lengths),
    ]


def _words(change: Change | None) -> list[str]:
    if change is None:
        return ["", "", ""]
    noise = "?" if change.noise is None else f"±{change.noise:.1%}"
    return [f"{change.relative:+.1%}", noise, _WORDS.get(change.verdict, change.verdict)]


def _unmatched(mine: Document, other: Document) -> Iterator[str]:
    """What `mine` has and `other` has not, in its order."""
    known = {_key(r) for r in other.results}
    for r in mine.results:
        if _key(r) not in known:
            yield f"{r.arm}, batch {r.batch}, context {r.context}, temperature {r.temperature:g}"


def _key(r: Result) -> Key:
    return r.method, r.batch, r.context, r.temperature, r.k


def _change(a: list[float], b: list[float]) -> Change | None:
    """None for rates of 0, of runs too short to have a step without prompt work: they say nothing."""
    return Change.of(a, b) if min(*a, *b) > 0 else None
