"""The page: whole, well formed, without anything to load; and the charts as pictures."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from documents import document, result

from specdec.bench.charts import charts
from specdec.bench.document import TaskResult, read_document
from specdec.bench.page import page
from specdec.bench.report import write_report
from specdec.bench.statistics import Acceptance, Interval

VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Checks that elements close in order; collects tags, ids, references and visible text."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
                self.refers.append(value)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def html() -> str:
    d = document()
    return page(d, charts(d))


def test_nothing_is_loaded_from_outside(html: str) -> None:
    reader = Reader(html)
    assert set(reader.tags).isdisjoint({"script", "img", "iframe", "object", "embed", "video", "audio", "base", "form"})
    assert all(ref.startswith("#") or ref == "data:," for ref in reader.refers)
    assert "://" not in html and "@import" not in html
    assert all(ref.startswith("#") for ref in re.findall(r"url\(([^)]*)\)", html))
    assert "default-src 'none'" in html, "a browser refuses what a mistake would load"


def test_references_inside_the_page_are_met_and_ids_are_unique(html: str) -> None:
    reader = Reader(html)
    assert len(reader.ids) == len(set(reader.ids))
    inside = [ref for ref in reader.refers if ref.startswith("#")] + re.findall(r"url\((#[^)]*)\)", html)
    assert inside and {ref[1:] for ref in inside} <= set(reader.ids)


def test_every_colour_of_the_charts_has_a_light_and_a_dark_value(html: str) -> None:
    used = set(re.findall(r"var\((--[\w-]+)\)", html))
    light, dark = html.split("@media (prefers-color-scheme: dark)", 1)
    for sheet in (light, dark.split("}", 2)[0]):
        assert used <= set(re.findall(r"(--[\w-]+):", sheet))
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert "#1f2430" not in drawn and "#2563eb" not in drawn and "#000000" not in drawn


def test_it_fits_a_phone(html: str) -> None:
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in html
    for svg in re.findall(r"<svg[^>]*>", html):
        assert "viewBox" in svg and " width=" not in svg and 'role="img" aria-label="' in svg
    assert html.count('<div class="scroll"><table>') == html.count("<table>") == 6


def test_charts_that_people_want_are_there(html: str) -> None:
    labels = re.findall(r'aria-label="([^"]*)"', html)
    assert labels == [
        "Decoding speed over plain",
        "Speed by task",
        "Acceptance by position",
        "Tokens per round",
        "Time between tokens, batch 1",
        "Time between tokens, batch 8",
        "Steps while prompts arrive, batch 8",
        "Where a round&#x27;s time goes",
        "Break-even of draft",
    ]
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        assert ElementTree.fromstring(svg).findall(".//path"), "a chart without a line"


def test_text_is_escaped_and_says_what_matters(html: str) -> None:
    text = " ".join(Reader(html).text.split())
    for words in (
        "model <x> with drafter small & fast on A device",
        "1.50×plain decoding's speed with lookup k=auto at batch 1",
        "skipped: lookup, batch 8, prompts that ship: out of memory: <all> of it",
        "mind the <gap>",
        "1 of 2 requests differ from plain, first: request 2 at token 7, margin 0.0123",
        "identical to plain (2 of 2 requests)",
        "ab" * 32,
        "specdec bench model <x>",
    ):
        assert words in text
    assert "controlled" not in text.lower()


def test_controlled_acceptance_is_written_on_everything() -> None:
    d = document(controlled=3.4, weights="random")
    drawn = charts(d)
    text = " ".join(Reader(page(d, drawn[:1])).text.split())
    assert "Controlled acceptance 3.4; random weights; these figures show cost" in text
    assert "1.35 to 1.65, 95 % interval over prompts, controlled acceptance 3.4" in text
    assert drawn and all("controlled acceptance 3.4" in " ".join(chart.title.split()) for chart in drawn)


def test_points_of_several_contexts_and_temperatures_have_charts_of_their_own() -> None:
    both = [result(m, k, temperature=t, speed=s) for t in (0.0, 1.0) for m, k, s in (("plain", 0, 1), ("lookup", 4, 2))]
    names = [chart.name for chart in charts(document(results=both))]
    assert len(names) == len(set(names)) and {"speedup-60-0", "speedup-60-1"} <= set(names)


def test_a_document_without_results_still_makes_a_page() -> None:
    d = document(results=[], break_even=[], best_depths=[], interrupted=True)
    assert charts(d) == [] and "interrupted" in Reader(page(d, [])).text


def test_report_folder_holds_page_pictures_and_document(tmp_path: Path) -> None:
    d = document()
    written = write_report(d, tmp_path / "a" / "report")
    assert written == tmp_path / "a" / "report" / "index.html" and written.read_text().startswith("<!DOCTYPE html>")
    assert read_document(written.parent / "bench.json") == d
    pictures = sorted(p.name for p in (written.parent / "charts").iterdir())
    assert len(pictures) == 9 and "speedup.png" in pictures
    assert all((written.parent / "charts" / p).read_bytes().startswith(b"\x89PNG") for p in pictures)


def test_the_same_document_makes_the_same_chart() -> None:
    first, second = (charts(document(break_even=[]))[0].svg() for _ in range(2))
    assert first == second


def test_a_document_of_before_a_field_came_is_read(tmp_path: Path) -> None:
    value = json.loads(document().to_json())
    for r in value["results"]:
        del r["acceptance"]["reached"], r["split"]["copied"]
    (tmp_path / "old.json").write_text(json.dumps(value))
    read = read_document(tmp_path / "old.json")
    assert read.results[0].acceptance.reached == [] and read.results[0].split.copied is None
    write_report(read, tmp_path / "report")


def test_odd_names_of_tasks_make_a_page(tmp_path: Path) -> None:
    """Dollar signs, which matplotlib would read as formulas, long names, and more tasks than a chart has room for."""
    names = ["costs $5 and $6", r"$\frac$", "long " * 60, "__hidden", *map(str, range(40))]
    tasks = [TaskResult(name, 1, 1.5, 9.0) for name in names]
    d = document(results=[result("plain", tasks=tasks), result("lookup", tasks=tasks)], break_even=[])
    chart = next(chart for chart in charts(d) if chart.name == "tasks")
    assert "costs $5 and $6" in chart.svg() and r"$\frac$" in chart.svg() and chart.figure.get_figheight() < 8
    write_report(d, tmp_path)


def test_the_caption_names_the_interval_that_is_drawn() -> None:
    over = {kind: result("lookup", decode_speedup=Interval(1.5, 1.4, 1.6, kind)) for kind in ("prompts", "runs")}
    captions = {kind: charts(document(results=[result("plain"), r]))[0].caption for kind, r in over.items()}
    assert captions["prompts"].endswith("Bars: 95 % interval over prompts.")
    assert "Bars: lowest to highest run" in captions["runs"] and "95 %" not in captions["runs"]


def test_charts_of_many_methods_and_points_are_legible() -> None:
    """Nothing is cut off at the edges, the axes keep their height beneath long legends, no two methods share a colour."""
    arms = [("plain", 0), *((m, k) for m in ("lookup", "draft") for k in (1, 2, 4, 8, "auto")), ("transformers", "")]
    short = Acceptance.of(Counter({(1, 1): 30}), 60)
    results = [result(m, k, temperature=t, acceptance=short) for t in (0.0, 0.7) for m, k in arms]
    d = document(results=[replace(r, context=16384) for r in results])
    drawn = charts(d)
    for chart in drawn:
        chart.figure.draw_without_rendering()
        (axes,) = chart.figure.axes
        width, box = chart.figure.bbox.width, axes.title.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= width, chart.title
        few_rows = chart.name.startswith(("break-even", "tasks"))
        assert axes.bbox.height / chart.figure.dpi > (0.3 if few_rows else 1.2), chart.name
    lines = {line.get_label(): line.get_color() for line in drawn[0].figure.legends[0].get_lines()}
    assert len(set(lines.values())) == len(lines)
    positions = next(chart for chart in drawn if chart.name.startswith("acceptance"))
    (axes,) = positions.figure.axes
    assert axes.get_xlim() == (0.5, 1.5) and all(t == round(t) for t in axes.get_xticks()), "no reason to look closer"
