"""What scripts/demo.py says about two runs of a prompt. CI runs the demo itself."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_gguf import write_tiny_gguf

import specdec
from specdec import LLM, SamplingParams

SOURCE = Path(specdec.__file__).parent.parent / "scripts" / "demo.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo"]


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with LLM(tmp_path / "tiny.gguf", drafter="lookup", device="cpu") as llm:
        yield llm


def test_verdict_names_the_first_difference_and_its_margin(demo, llm: LLM) -> None:
    plain = llm.generate("hi hi", SamplingParams(max_tokens=6, temperature=0, k=0))[0]
    assert demo.verdict(llm, plain, plain) == "identical to plain"
    other = (plain.token_ids[3] + 1) % 262
    altered = replace(plain, token_ids=[*plain.token_ids[:3], other, 9, 9])
    with torch.no_grad():
        logits = llm.model(torch.tensor([plain.prompt_token_ids + plain.token_ids[:3]])).logits[0, -1]
    margin = float(logits[plain.token_ids[3]] - logits[other])
    assert margin > 0
    assert demo.verdict(llm, plain, altered) == f"differs at token 3, margin {margin:.3g}"
    shorter = replace(plain, token_ids=plain.token_ids[:4])
    assert demo.verdict(llm, plain, shorter) == "differs at token 4, where one of them ends"


def test_table_has_a_row_per_prompt(demo, llm: LLM) -> None:
    outputs = [llm.generate("hi hi", SamplingParams(max_tokens=6, temperature=0, k=k))[0] for k in (0, None)]
    comparison = demo.Comparison("chat", *outputs, demo.verdict(llm, *outputs))
    table = demo.table([comparison])
    assert table.row_count == 1 and list(table.columns[-1].cells) == ["identical to plain"]
    assert float(next(table.columns[2].cells)) > 0
