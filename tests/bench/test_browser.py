"""The page in headless Chromium: nothing logged, nothing asked for, every chart there and drawn, on a phone and in the dark."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_chromium
from documents import document

from specdec.bench.charts import charts
from specdec.bench.report import write_report

CHARTS = """[...document.querySelectorAll('figure svg')].map(svg => {
    const box = svg.getBoundingClientRect(), drawn = [...svg.querySelectorAll('path, use')];
    return {label: svg.getAttribute('aria-label'), left: box.left, right: box.right, height: box.height,
            shapes: drawn.filter(shape => shape.getBoundingClientRect().width > 0).length,
            ink: getComputedStyle(svg.querySelector('text')).fill}})"""
WRONG_WORDS = """[...document.querySelectorAll('figure svg')].flatMap(svg => {
    const box = svg.getBoundingClientRect(), zoom = box.width / svg.viewBox.baseVal.width;
    return [...svg.querySelectorAll('text')].filter(text => {
        const b = text.getBoundingClientRect(), size = zoom * parseFloat(getComputedStyle(text).fontSize);
        return b.left < box.left - 1 || b.right > box.right + 1 || size < 9 }).map(text => text.textContent)})"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(document(), tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None, "else this file is not collected"
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_whole(browser: Browser, report: Path, width: int, scheme: str) -> None:
    browser.open(report, width, 800, scheme)
    assert browser.complaints == [] and browser.requests == [report.as_uri()]
    drawn = browser.evaluate(CHARTS)
    assert [chart["label"] for chart in drawn] == [chart.title for chart in charts(document())]
    for chart in drawn:
        assert 0 <= chart["left"] < chart["right"] <= width and chart["height"] > 60 and chart["shapes"] > 5
    assert browser.evaluate(WRONG_WORDS) == [], "words cut off, or too small to read"
    assert browser.evaluate("document.documentElement.scrollWidth") == width, "only tables scroll sideways"
    page, ink = browser.evaluate("getComputedStyle(document.body).backgroundColor"), drawn[0]["ink"]
    assert (brightness(page) > 600) == (brightness(ink) < 300) == (scheme == "light")
    assert browser.screenshot().startswith(b"\x89PNG")


def test_a_page_that_asks_for_something_would_be_caught(browser: Browser, report: Path, tmp_path: Path) -> None:
    """The checks above can fail: a picture from elsewhere is refused by the page's policy, and the browser says so."""
    bad = tmp_path / "bad.html"
    picture = '<img src="http://127.0.0.1:9/x.png" alt="">'
    bad.write_text(report.read_text().replace("</body>", f"{picture}</body>"))
    browser.open(bad, 800, 600, "light")
    assert any("Content Security Policy" in text for text in browser.complaints)
    bad.write_text(f"<!DOCTYPE html>{picture}")
    browser.open(bad, 800, 600, "light")
    assert "http://127.0.0.1:9/x.png" in browser.requests


def brightness(colour: str) -> int:
    """Of a computed colour, "rgb(r, g, b)": 0 to 765."""
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
