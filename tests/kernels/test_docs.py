"""The Python of docs/kernels.md runs as it stands, one block after the other."""

import re
from pathlib import Path

import torch

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_code_runs() -> None:
    torch.manual_seed(0)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    assert len(blocks) == 3
    for code in blocks:
        exec(compile(code, str(DOCS), "exec"), names)
    assert names["out"].isfinite().all()
    assert names["indptr"].tolist() == [0, 3, 4]
