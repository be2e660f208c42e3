"""The package works alone: torch and the standard library are all it loads."""

import subprocess
import sys
from pathlib import Path

import specdec.kvpool

SCRIPT = """
import sys, torch
before = set(sys.modules)
import specdec.kvpool
loaded = {name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names}
print(sorted(loaded - {"specdec"}))
pool = specdec.kvpool.KVPool(5, 3)
pool.add_model("m", [specdec.kvpool.KVSpec(0, 1, 4, 4, torch.float32, "cpu")])
table = pool.new_table()
assert table.grow(7)
print(specdec.kvpool.block_table([table], 4).tolist())
"""


def test_import_loads_torch_only():
    root = Path(specdec.kvpool.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded, table = done.stdout.splitlines()
    assert all(name.split("'")[1].startswith("specdec.kvpool") for name in loaded.split(", ")), loaded
    assert "specdec.kvpool.pool" in loaded and table == "[[0, 1, 2, -1]]"
