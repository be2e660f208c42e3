"""What the terminal shows, and what a comparison says."""

import dataclasses
import re
from collections import Counter

import pytest
from documents import document, environment, result
from rich.console import Console

from specdec.bench.compare import pairs, print_comparison
from specdec.bench.document import Failure, TaskResult
from specdec.bench.statistics import Acceptance, Spread
from specdec.bench.table import by_task, print_results


def shown(call, *documents, width: int = 140) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)
    call(*documents, console)
    return console.export_text()


def test_tables_say_everything_once() -> None:
    text = shown(print_results, document())
    for words in (
        "model <x>, drafter small & fast, float32 on A device",
        "1.50 (1.35-1.65)",
        "8.0/10.0/30.0",
        "tok/s within 50 ms",
        "tokens draft k=4, batch 1, temperature 0: 1 of 2 requests differ from plain",
        "skipped lookup at batch 8, prompts that ship: out of memory: <all> of it",
        "note mind the <gap>",
        "Break-even",
        "never pays",
        "Which k pays",
        "k=4, 2.26×",
        "Mixed load, 50 / 90 / 99 %: 4 prompts of 4,096 tokens arrive",
        "90.0/200.0/200.0",
        "512 of 512",
    ):
        assert words in text
    assert "controlled" not in text and "temp." not in text.replace("temperature", ""), (
        "what does not vary has no column"
    )


def test_all_identical_is_one_line() -> None:
    d = document(results=[result("plain"), result("lookup", 4)], failures=[])
    assert "tokens every method's are the same as plain decoding's, 2 requests compared" in shown(print_results, d)


def test_break_even_says_what_is_needed_and_what_there_was() -> None:
    lines = [line.split() for line in shown(print_results, document()).splitlines()]
    after = lines[lines.index(["Break-even"]) :]
    assert ["1", "60", "lookup", "k=auto", "0.6", "1.06", "3.20", "10%", "–"] in after
    assert ["1", "60", "draft", "k=4", "4.0", "2.00", "3.20", "25%", "0.52"] in after
    assert ["8", "60", "draft", "k=2", "2.0", "5.00", "never", "pays", "never", "pays"] in after, "and not measured"


def test_speed_by_task_at_the_smallest_batch() -> None:
    lines = [line.split() for line in shown(print_results, document()).splitlines()]
    after = lines[next(i for i, line in enumerate(lines) if line[:3] == ["Speed", "of", "a"]) :]
    assert after[2] == ["batch", "method", "chat", "<code>"] and ["1", "lookup", "k=auto", "1.50", "1.50"] in after
    assert by_task(document(results=[result("plain")])) is None
    one = [result(m, tasks=result("plain").tasks[:1]) for m in ("plain", "lookup")]
    assert by_task(document(results=one)) is None


def test_positions_without_samples_are_left_out() -> None:
    few = Acceptance.of(Counter({(4, 1): 15, (4, 4): 6}), 45)
    text = shown(print_results, document(results=[result("plain"), result("lookup", 4, acceptance=few)]))
    assert re.search(r"2\.14 +100 29 +54%", text) and "fewer than 20 rounds" in text
    old = dataclasses.replace(few, reached=[])  # of a document that does not tell
    text = shown(print_results, document(results=[result("plain"), result("lookup", 4, acceptance=old)]))
    assert re.search(r"2\.14 +100 29 100 100 +54%", text)


def test_every_table_carries_the_label() -> None:
    text = shown(print_results, document(controlled=3.4))
    assert text.count("controlled acceptance 3.4") == 7


@pytest.mark.parametrize("width", [140, 100, 80, 50])
def test_tables_fit_the_terminal(width: int) -> None:
    """In a narrow one the columns are spread over several tables of the same rows; nothing is cut off or broken."""
    results = shown(print_results, document(), width=width)
    change = shown(print_comparison, document(), document(), width=width)
    for text, cells in [(results, ("1.50 (1.35-1.65)", "8.0/10.0/30.0", "100 40 100 100", "identical")),
                        (change, ("100.0 → 100.0", "+0.0%", "within noise", "3.20 → 3.20"))]:  # fmt: skip
        assert "…" not in text and all(len(line.rstrip()) <= width for line in text.splitlines())
        assert all(cell in text for cell in cells), text


def test_comparison_tells_change_from_noise() -> None:
    before = document()
    faster = [
        dataclasses.replace(r, decode_tok_s=Spread.of([v * 1.5 for v in r.decode_tok_s.values])) for r in before.results
    ]
    after = document(results=faster[:4])
    assert len(pairs(before, after)) == 4
    text = shown(print_comparison, before, after, width=180)
    assert "100.0 → 150.0" in text and "+50.0%" in text and "faster" in text and "within noise" in text
    assert "only in the first file: draft k=4, batch 8, context 60, temperature 0" in text
    lines = [
        line for line in shown(print_comparison, document(results=[]), before, width=180).splitlines() if "only" in line
    ]
    assert [line.split(",")[0] for line in lines] == [f"only in the second file: {r.arm}" for r in before.results]
    assert "differs" not in text


def test_comparison_names_what_else_differs() -> None:
    other = document(
        environment=environment(device="B", versions={"torch": "2.11.0", "numpy": "2"}),
        controlled=2.0,
        settings={"output_len": 20, "verifier": "block"},
    )
    text = shown(print_comparison, document(), other, width=180)
    for words in (
        "device: A device / B",
        "torch: 2.13.0 / 2.11.0",
        "numpy: None / 2",
        "acceptance: measured / controlled",
        "verifier: coupled / block",
    ):
        assert f"differs {words}" in text


def test_another_verifier_is_in_the_title() -> None:
    assert "verifier" not in shown(print_results, document())
    assert "model <x>, drafter small & fast, verifier block, float32" in shown(
        print_results, document(settings={"verifier": "block"})
    )


def test_comparison_of_single_runs_says_that_it_knows_no_noise() -> None:
    single = document(results=[result("plain", decode_tok_s=Spread.of([100.0]), whole_tok_s=Spread.of([80.0]))])
    text = shown(print_comparison, single, single, width=180)
    assert "unknown noise" in text and "use --runs 3 or more" in text
    assert "no method was measured" in shown(print_comparison, single, document(results=[]))


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    """Of tasks, files and models: rich would take what stands in brackets for a style, and fail at one that closes none."""
    odd = [TaskResult("[red]a", 1, 1.0, 9.0), TaskResult("b [/i]", 1, 1.0, 9.0)]
    failed = Failure("draft", 4, 8, "[bold] [/u].jsonl", 0.0, "broken")
    d = document(results=[result("plain", tasks=odd), result("lookup", tasks=odd)], failures=[failed])
    text = shown(print_results, d)
    assert "[red]a" in text and "b [/i]" in text and "skipped draft at batch 8, [bold] [/u].jsonl: broken" in text
    text = shown(print_comparison, d, document(target="[/u] other"), width=180)
    assert "target: model <x> / [/u] other" in text


def test_of_many_tasks_the_most_asked_are_shown() -> None:
    many = [TaskResult(f"t{i}", 1 + (i >= 30), 1.0, 9.0) for i in range(40)]
    d = document(results=[result("plain", tasks=many), result("lookup", tasks=many)])
    sheet = by_task(d)
    assert sheet is not None and list(sheet.columns) == [
        *(f"t{i}" for i in range(6)),
        *(f"t{i}" for i in range(30, 40)),
    ]
    assert "the 16 most asked of 40 tasks" in shown(print_results, d)


def test_rates_of_nothing_are_not_compared() -> None:
    """Runs too short to have a step without prompt work have no decoding rate, and no change of one."""
    short = document(results=[result("plain", decode_tok_s=Spread.of([0.0, 0.0]))])
    text = shown(print_comparison, short, short, width=180)
    assert "0.0 → 0.0" in text and "unknown" not in text and "single run" not in text and text.count("+0.0%") == 1
