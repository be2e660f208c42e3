"""The README is true: its commands exist, its tree is the package, its round is the code, its example runs."""

import contextlib
import inspect
import io
import os
import re
import textwrap
from pathlib import Path

import specdec
from specdec.loading import Loaded
from specdec.round import Round

ROOT = Path(specdec.__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_commands_exist() -> None:
    commands = [line.split("#")[0].split()[0] for line in blocks("bash")[0].splitlines()]
    assert commands == ["scripts/demo", "scripts/test"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


def test_ci_runs_the_commands() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert {"scripts/demo", "scripts/test"} <= set(lines)


def test_tree_names_every_part_and_nothing_else() -> None:
    tree = blocks("")[0].splitlines()
    named = {line.split()[0].rstrip("/") for line in tree if line.startswith("  ")}
    parts = {
        path.name for path in (ROOT / "specdec").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert named == parts - {"__init__.py", "__main__.py"}
    assert all((ROOT / line.split()[0]).is_dir() for line in tree if not line.startswith(" "))


def test_round_is_the_code() -> None:
    shown = blocks("python")[1]
    assert shown in textwrap.dedent(inspect.getsource(Round.stages).split('"""')[-1])


def test_example_runs(smollm2: Loaded) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks("python")[0], {})
    assert "harbour master keeps a ledger" in printed.getvalue()
