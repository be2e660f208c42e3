"""scripts/bench_step.py on a tiny model: the forward that it times is the model's own, its JSON line is whole."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import tiny

import specdec
from specdec.kvpool import KVPool
from specdec.model import PagedModel

SCRIPTS = Path(specdec.__file__).parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location("bench_step", SCRIPTS / "bench_step.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_step", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_forward_that_is_timed_is_the_models(script: ModuleType) -> None:
    model = tiny("llama")
    paged = PagedModel(model, KVPool(num_blocks=8, block_size=4), "target")
    whole = script.packed(2, 10, 10, paged)  # all of two rows' tokens at once, then the last three again
    logits = paged.extend(whole).view(2, 10, -1)
    last = script.packed(2, 3, 10, paged)
    last.token_ids = whole.token_ids.view(2, 10)[:, 7:].reshape(-1)
    torch.testing.assert_close(paged.extend(last).view(2, 3, -1), logits[:, 7:], rtol=1e-4, atol=1e-4)
    layer = model.model.layers[0]
    sizes = sum(w.numel() for w, _ in script.products_of(layer, paged))
    assert sizes == sum(m.weight.numel() for m in layer.modules() if isinstance(m, torch.nn.Linear)), "each weight once"
    assert len(script.products_of(layer, paged)) == 4, "q, k, v as one, gate and up as one"
    paged.close()


def test_it_prints_tables_and_one_json_line(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--target tiny --drafter tiny --batch 2 --k 2 --length 2 --context 40 --output 8 --device cpu"
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *arguments.split()])
    script.main()
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert "A layer" in out and "controlled acceptance 2" in out and result["controlled"] == 2
    assert [(r["method"], r["batch"]) for r in result["rounds"]] == [("plain", 2), ("draft k=2", 2)]
    for r in result["rounds"]:
        parts = [value for name, value in r["split"].items() if name.endswith("_ms")]
        assert sum(parts) == pytest.approx(r["round_ms"]) and r["floor"]["bytes"] > 0
    assert [(x["model"], x["tokens"]) for x in result["layers"]] == [("target", 1), ("target", 3), ("drafter", 1)]
    assert all(x["products_us"] > 0 and x["floor_us"] > 0 and x["forward_ms"] > 0 for x in result["layers"])
