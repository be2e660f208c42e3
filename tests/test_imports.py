"""Imports go one way, stand at the top of their file, and kernels and kvpool are usable without transformers."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(specdec.__file__).parent

# Lowest first: a module may import from lower layers and from its own. Names of one layer don't know each other,
# unless they are written with "<": "a < b" lets b import a.
LAYERS = [
    ["shown", "advice"],
    [
        "kernels",
        "kvpool",
        "sampling",
        "aside",
        "stopwatch",
        "uploads",
        "policy",
        "checkpoint < converted < loading",
        "acceptance",
        "detokenizer",
        "logprobs",
        "prompt_file",
    ],
    ["sequence", "noise", "distribution", "grammar"],
    ["adjustments < rows"],
    ["model"],
    ["draft"],
    ["verify"],
    ["processing < round"],
    ["buckets < graphs", "scheduler"],
    ["chunks"],
    ["stats", "listener", "group < flight < prompts"],
    ["engine"],
    ["metrics < output < limits < worker < warm_up < options < llm"],
    ["hf", "bench"],
    ["audit"],
    ["cli"],
    ["__main__"],
]


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below it; a folder's __init__ has the folder's name."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            paths[name] = path
    return paths


def own_imports(path: Path, tree: ast.AST) -> list[tuple[ast.stmt, str]]:
    """Statements that import from specdec, with the dotted name below it.

    `from specdec.a import b` names the module a.b if there is one, else the module a.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(node, f"{node.module}.{alias.name}") for alias in node.names]
    own = [(node, name.removeprefix("specdec.")) for node, name in found if name.startswith("specdec.")]
    return [(node, name if name in modules() else name.rpartition(".")[0]) for node, name in own]


def part(module: str) -> str:
    """The folder or file right under specdec that a module belongs to."""
    return module.split(".")[0]


def rank(name: str) -> tuple[int, int, int]:
    """(layer, group in it, place in the group's chain)."""
    for layer, groups in enumerate(LAYERS):
        for group, chain in enumerate(groups):
            if name in chain.split(" < "):
                return layer, group, chain.split(" < ").index(name)
    raise AssertionError(f"specdec/{name} has no layer in {Path(__file__).name}: give it one")


def allowed(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    (layer, group, place), (low_layer, low_group, low_place) = rank(importer), rank(imported)
    return low_layer < layer or (low_layer, low_group) == (layer, group) and low_place < place


def test_every_part_has_a_layer() -> None:
    for module in modules():
        rank(part(module))


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_to_lower_layers(module: str) -> None:
    path = modules()[module]
    for node, imported in own_imports(path, ast.parse(path.read_text())):
        if imported:  # else one of the lazy names of the package itself
            assert allowed(part(module), part(imported)), f"{module}:{node.lineno} must not import specdec.{imported}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_own_imports_stand_at_the_top(module: str) -> None:
    """At module level, or under TYPE_CHECKING there."""
    path = modules()[module]
    tree = ast.parse(path.read_text())
    top = set(tree.body)
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            top |= set(node.body)
    late = [node.lineno for node, _ in own_imports(path, tree) if node not in top]
    assert not late, f"{module}: imports of specdec below the top of the file in lines {late}"


def test_no_cycles() -> None:
    """Between modules, not only between layers: two files of a folder may not import each other either."""
    graph = {
        module: {imported for _, imported in own_imports(path, ast.parse(path.read_text())) if imported in modules()}
        for module, path in modules().items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for imported in graph[module] - {module}:
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("package", ["kernels", "kvpool"])
def test_lower_packages_load_no_transformers(package: str) -> None:
    code = (
        f"import sys, specdec.{package}; own = sorted(m for m in sys.modules if m.startswith('specdec.')); "
        f"print('transformers' in sys.modules, all(m.startswith('specdec.{package}') for m in own))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout == "False True\n", out.stderr


def test_lazy_names() -> None:
    assert set(specdec.__all__) <= set(dir(specdec))
    assert specdec.SamplingParams is __import__("specdec.sampling", fromlist=["SamplingParams"]).SamplingParams
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = specdec.nonsense
