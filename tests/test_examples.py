"""The examples of the plug-in run, here with a tiny model in the place of the demo's, and say what they promise."""

import pathlib
import runpy

import pytest
from tiny_gguf import write_tiny_gguf

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("hf_*.py")))
def test_an_example_of_the_plug_in_runs(name, tmp_path, monkeypatch, capsys):
    write_tiny_gguf(tmp_path / "tiny.gguf", context=1024)
    monkeypatch.setenv("SPECDEC_MODEL_SMOLLM2_135M", str(tmp_path / "tiny.gguf"))
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    said = capsys.readouterr().out
    assert "the same text: True" in said and "tokens per round and row" in said
    assert "False" not in said
