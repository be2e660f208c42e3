"""What an audit found: checks by level, for people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MEANING = {
    0: "exact: every draft and outcome of a model of 3 to 6 tokens summed up; only a wrong rule can fail",
    1: "sampler: draws against known probabilities, and the tail of its noise",
    2: "greedy: the same tokens with speculation on and off, and the model's own",
    3: "seeds: the same tokens at a temperature, speculation on and off",
    4: "distribution: whole outputs against the model's probabilities, and against plain decoding's",
}
PASS, FAIL, SKIPPED = "pass", "FAIL", "skipped"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. found: what was measured; bound: what it must be; odds: of a false alarm, a number.

    status: "pass", "FAIL", or "skipped" with the reason as `found`.
    """

    level: int
    name: str
    status: str
    found: str
    bound: str = ""
    odds: float = 0.0


def check(level: int, name: str, passed: bool, found: str, bound: str, odds: float = 0.0) -> Check:
    return Check(level, name, PASS if passed else FAIL, found, bound, odds)


def skipped(level: int, name: str, reason: str) -> Check:
    return Check(level, name, SKIPPED, reason)


@dataclass
class Report:
    """subject: what was audited, in words. seconds: how long it took."""

    subject: str
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.red

    @property
    def red(self) -> set[int]:
        """Levels with a check that failed."""
        return {c.level for c in self.checks if c.status == FAIL}

    @property
    def odds(self) -> float:
        """Of a false alarm of the whole audit, at most."""
        return sum(c.odds for c in self.checks)

    @property
    def verdict(self) -> str:
        if not self.checks:
            return "nothing was checked"
        if self.red:
            return f"NOT LOSSLESS: level {', '.join(map(str, sorted(self.red)))} failed"
        return "no difference found"

    def to_json(self) -> str:
        fields = {"verdict": self.verdict, "passed": self.passed, "false_alarm_odds": self.odds}
        return json.dumps(asdict(self) | fields, indent=1)


def print_report(report: Report, console: Console) -> None:
    """A table of the checks, then what each level means."""
    table = Table(box=box.SIMPLE_HEAD, title=f"Audit of {escape(report.subject)}", title_justify="left")
    for name in ("level", "check", "", "found", "must be", "false alarm"):
        table.add_column(name, no_wrap=name in ("level", ""))
    colours = {PASS: "green", FAIL: "bold red", SKIPPED: "dim"}
    for c in report.checks:
        odds = f"{c.odds:.0e}" if c.odds else "never" if c.status != SKIPPED else ""
        status = f"[{colours[c.status]}]{c.status}[/]"
        table.add_row(str(c.level), escape(c.name), status, escape(c.found), escape(c.bound), odds)
    console.print(table)
    for level in sorted({c.level for c in report.checks}):
        console.print(f"[dim]{level}  {MEANING[level]}[/]")
    style = "bold red" if report.red else "bold green"
    odds = f" (odds of a false alarm at most {report.odds:.1e})" if report.checks else ""
    console.print(f"[{style}]{report.verdict}[/]{odds}, {report.seconds:.0f} s")
