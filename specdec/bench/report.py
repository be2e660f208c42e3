"""A folder with the page of a document, its charts as PNG, and the document itself."""

from __future__ import annotations

from pathlib import Path

from specdec.bench.charts import charts
from specdec.bench.document import Document
from specdec.bench.page import page


def write_report(document: Document, folder: Path) -> Path:
    """Write index.html, charts/*.png and bench.json; returns the page's path. Raises OSError where it can't write."""
    drawn = charts(document)
    (folder / "charts").mkdir(parents=True, exist_ok=True)
    for chart in drawn:
        (folder / "charts" / f"{chart.name}.png").write_bytes(chart.png())
    (folder / "bench.json").write_text(document.to_json(), encoding="utf-8")
    (folder / "index.html").write_text(page(document, drawn), encoding="utf-8")
    return folder / "index.html"
