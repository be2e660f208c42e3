"""Results of `specdec bench` as the section "specdec bench" of docs/results.md.

    python scripts/bench_results.py FILE.json... [--note TEXT] [--into docs/results.md] [--report DIR]

Prints the section; with --into it replaces the one that is there, or is put before "Not measured yet". --note: what else a
reader should know, of a machine that did other work, say. --report: a folder for the page of each document, as `specdec
bench --report` writes it, of runs on a machine without matplotlib.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from specdec.bench import write_report
from specdec.bench.document import Document, Result, read_document
from specdec.bench.table import (
    MIXED_COLUMNS,
    by_task,
    interval,
    mixed_cells,
    number,
    percentiles,
    places,
    spread,
    where,
)

HEADING = "## specdec bench"
BEFORE = "## Not measured yet"
INTRODUCTION = (
    "Written by `python scripts/bench_results.py FILE.json... --into docs/results.md`; what each column means is in\n"
    "`docs/benchmarking.md`. Latencies are 50 / 90 / 99 %, `tokens` says how many requests had exactly plain decoding's."
)
COLUMNS = (
    "decode tok/s",
    "× plain",
    "whole tok/s",
    "first token ms",
    "ms per token",
    "ms per step",
    "acceptance length",
)
COLUMNS += ("% of floor", "tokens")


def section(documents: list[Document], note: str | None = None) -> str:
    parts = [HEADING, INTRODUCTION, *([note] if note else []), *(part for d in documents for part in paragraphs(d))]
    return "\n\n".join(parts) + "\n"


def paragraphs(document: Document) -> Iterator[str]:
    e = document.environment
    drafter = f", drafter {document.drafter}" if document.drafter else ""
    label = f" **{document.label.capitalize()}.**" if document.label else ""
    yield f"### {document.target}{drafter}, {e.device}"
    versions = ", ".join(f"{name} {e.versions[name]}" for name in ("torch", "transformers") if name in e.versions)
    how = f"{e.dtype}, {document.weights} weights, {versions}, {e.threads} threads, copy {e.copy_bandwidth_gb_s:g} GB/s"
    yield f"`{command(document)}`:\n{how}.{label}"
    yield table(document, COLUMNS, [(r, cells(r)) for r in document.results])
    if tasks := by_task(document):
        yield f"{tasks.title}:"
        yield markdown([*tasks.keys, *tasks.columns], tasks.rows)
    mixed = [(r, mixed_cells(r.mixed)) for r in document.results if r.mixed]
    if mixed:
        first = next(r.mixed for r in document.results if r.mixed)
        yield f"While {first.arrivals} prompts of {first.prompt_len:,} tokens arrive, one after another:"
        yield table(document, MIXED_COLUMNS, mixed)
    notes = [f"- skipped: {f.method} at batch {f.batch}: {f.reason}" for f in document.failures]
    notes += [f"- {r.arm}, batch {r.batch}: {r.losslessness.line}" for r in document.results if differs(r)]
    notes += [f"- {warning}" for warning in document.warnings]
    if notes:
        yield "\n".join(notes)


def command(document: Document) -> str:
    """Without the places that files were written to."""
    return "specdec " + re.sub(r" --(json|report) \S+", "", " ".join(document.command))


def differs(r: Result) -> bool:
    return r.losslessness is not None and r.losslessness.identical < r.losslessness.compared


def cells(r: Result) -> list[str]:
    same = r.losslessness
    return [
        spread(r.decode_tok_s), interval(r.decode_speedup), spread(r.whole_tok_s), number(r.ttft_ms.p50),
        percentiles(r.itl_token_ms), percentiles(r.itl_step_ms),
        f"{r.acceptance.length:.2f}" if r.acceptance else "", f"{r.floor.percent:.0f}" if r.floor else "",
        f"{same.identical} of {same.compared}" if same else "",
    ]  # fmt: skip


def table(document: Document, columns: tuple[str, ...], rows: list[tuple[Result, list[str]]]) -> str:
    return markdown([*places(document), "method", *columns], [[*where(document, r), *found] for r, found in rows])


def markdown(names: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *rows])


def put(text: str, new: str) -> str:
    """`text` with `new` in the place of its section, which ends where the next one begins."""
    if HEADING in text:
        start = text.index(HEADING)
        end = text.find("\n## ", start)
        return text[:start] + new + (text[end:] if end >= 0 else "")
    if BEFORE not in text:
        raise SystemExit(f"expected the heading {HEADING!r} or {BEFORE!r}, found neither")
    return text.replace(BEFORE, f"{new}\n{BEFORE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--note")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    documents = [read_document(file) for file in args.files]
    new = section(documents, args.note)
    for file, document in zip(args.files, documents, strict=True) if args.report else ():
        write_report(document, args.report / file.stem)
    if args.into:
        args.into.write_text(put(args.into.read_text(), new))
    else:
        print(new)


if __name__ == "__main__":
    main()
