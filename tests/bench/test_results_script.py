"""scripts/bench_results.py: documents as the section of docs/results.md, written anew as often as one likes."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from documents import document

import specdec

ROOT = Path(specdec.__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_results", ROOT / "scripts" / "bench_results.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_section_says_what_was_measured(script: ModuleType) -> None:
    text = script.section(
        [document(command=["bench", "m", "--json", "/tmp/a.json", "-k", "4"]), document(controlled=3.4)]
    )
    for words in (
        "`specdec bench m -k 4`:",
        "| 1 | lookup k=auto | 150 ±2% | 1.50 (1.35-1.65) |",
        "90.0/200.0/200.0 |",
        "| batch | method | chat | <code> |",
        "| 1 | lookup k=auto | 1.50 | 1.50 |",
        "| 2 of 2 |",
        "- skipped: lookup at batch 8: out of memory: <all> of it",
        "- draft k=4, batch 1: 1 of 2 requests differ from plain, first: request 2 at token 7, margin 0.0123",
        "**Controlled acceptance 3.4.**",
    ):
        assert words in text
    assert "/tmp" not in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| 1 | plain | 100")}
    assert len(widths) == 1


def test_it_goes_before_what_is_missing_and_replaces_itself(script: ModuleType) -> None:
    before = "# Results\n\n## A\n\nx\n\n## Not measured yet\n\ny\n"
    once = script.put(before, script.section([document()]))
    assert once.index("## A") < once.index("## specdec bench") < once.index("## Not measured yet")
    other = script.put(once, script.section([document(target="another")], "A busy machine."))
    assert "\n\nA busy machine.\n\n### another" in other
    assert "another" in other and "model <x>," not in other and other.endswith("## Not measured yet\n\ny\n")
    assert script.put(once, script.section([document()])) == once
    with pytest.raises(SystemExit, match="expected the heading"):
        script.put("# Nothing", "x")


def test_the_results_page_has_the_section_or_its_place(script: ModuleType) -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    assert script.HEADING in text or script.BEFORE in text
