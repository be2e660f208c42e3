"""Cases of paged attention that the CPU (twin, interpreter) and the GPU tests share: a pairwise cover, and known faults.

The faults are those reported against other paged-attention kernels; each name says which repository and issue it stands
for, so that whoever reads a failure can read the report. What takes more than a call is a test of its own that names them.
Reports about tuning while a graph is captured (triton#10596), tensor descriptors (triton#9259, vllm#42545), fused rotary
embedding (flash-attention#862) and masks over the whole prefix (sglang#3731) have no case: there is none of these here.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

from tests.kernels.attention_oracle import Case, make_case, tree_of

FP8 = torch.float8_e4m3fn
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

QUERIES = {"one": (1, 1, 1), "five": (5, 5, 5), "ragged": (2, 0, 5), "wide": (8, 1, 16), "chunk": (11, 2, 35)}

KEYS: dict[str, Callable[[int, int], tuple[int, int, int]]] = {
    "none": lambda q, page: (0, 1, q),
    "short": lambda q, page: (max(q - 1, 0), q, q + 1),
    "page": lambda q, page: (min(page, 140) - 1, min(page, 140), min(page, 140) + 1),
    "tile": lambda q, page: (63, 64, 65),
    "long": lambda q, page: (97, 40, 130),
}
"""Lengths of three sequences, of which the first has q new tokens."""

OPTIONS: dict[str, Callable[[tuple[int, ...], int, int], dict[str, Any]]] = {
    "plain": lambda q_lens, heads, kv_heads: {},
    "window": lambda q_lens, heads, kv_heads: dict(window=19),
    "softcap": lambda q_lens, heads, kv_heads: dict(softcap=3.0),
    "sinks": lambda q_lens, heads, kv_heads: dict(sinks=torch.linspace(-1, 2, heads)),
    "alibi": lambda q_lens, heads, kv_heads: dict(alibi_slopes=2.0 ** -torch.arange(1, heads + 1)),
    "bidirectional": lambda q_lens, heads, kv_heads: dict(causal=False),
    "tree": lambda q_lens, heads, kv_heads: dict(tree_mask=torch.cat([random_tree(n) for n in (*q_lens, 3)])),
    "fp8": lambda q_lens, heads, kv_heads: dict(
        k_scale=torch.linspace(0.5, 2, kv_heads), v_scale=torch.linspace(2, 0.5, kv_heads)
    ),
    "all": lambda q_lens, heads, kv_heads: dict(
        window=31, softcap=5.0, sinks=torch.ones(heads), alibi_slopes=torch.full((heads,), 0.1)
    ),
}

FACTORS: dict[str, tuple] = {
    "page": (1, 3, 16, 64, 256, 544),
    "dim": (64, 72, 80, 96, 128, 192, 256),
    "v_dim": ("same", 64),
    "group": (1, 3, 5, 7, 8, 16),
    "queries": tuple(QUERIES),
    "keys": tuple(KEYS),
    "option": tuple(OPTIONS),
    "layout": ("NHD", "HND", "KV"),
    "dtype": tuple(DTYPES),
}


def random_tree(nodes: int) -> torch.Tensor:
    """Bit rows of a random tree whose nodes follow their parents."""
    rng = random.Random(nodes)
    return tree_of([-1, *(rng.randrange(node) for node in range(1, nodes))][:nodes])


def pairwise(factors: dict[str, tuple], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every two values of two factors meet at least once: greedy, each row the best of 30 random ones."""
    rng, names = random.Random(seed), list(factors)
    open_ = {(a, va, b, vb) for a, b in itertools.combinations(names, 2) for va in factors[a] for vb in factors[b]}

    def covered(row: dict[str, Any]) -> set:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)} & open_

    rows = []
    while open_:
        a, va, b, vb = min(open_, key=str)
        drawn = [{n: rng.choice(values) for n, values in factors.items()} | {a: va, b: vb} for _ in range(30)]
        rows.append(max(drawn, key=lambda row: len(covered(row))))
        open_ -= covered(rows[-1])
    return rows


MATRIX = pairwise(FACTORS)


def matrix_id(row: dict[str, Any]) -> str:
    return "-".join(f"{value}" if isinstance(value, str) else f"{name}{value}" for name, value in row.items())


def matrix_case(row: dict[str, Any], kv_heads: int = 1, dtype: torch.dtype | None = None) -> Case:
    """The case of a row of MATRIX, with `dtype` in place of the row's where a device lacks it."""
    q_lens, dim, page = QUERIES[row["queries"]], row["dim"], row["page"]
    heads = (row["group"] * kv_heads, kv_heads)
    options = OPTIONS[row["option"]](q_lens, *heads)
    dims = (dim, dim if row["v_dim"] == "same" else row["v_dim"])
    keys = KEYS[row["keys"]](q_lens[0], page)
    case = make_case(
        list(q_lens), list(keys), heads=heads, dims=dims, block_size=page, dtype=dtype or DTYPES[row["dtype"]],
        padding=3, layout=row["layout"], **options,
    )  # fmt: skip
    return to_fp8(case) if row["option"] == "fp8" else case


def to_fp8(case: Case) -> Case:
    """The same case with its caches in float8_e4m3fn; the oracle reads those, so rounding is no error."""
    case.k_cache, case.v_cache = case.k_cache.to(FP8), case.v_cache.to(FP8)
    return case


def _layers_in_a_page() -> Case:
    """A pool [num_blocks, layers, 2, block_size, Hkv, D]: one layer's view has a block stride far over its own size."""
    case = make_case([3, 1], [40, 17], block_size=16)
    pool = torch.full((case.k_cache.shape[0], 4, 2, *case.k_cache.shape[1:]), float("nan"))
    pool[:, 2, 0], pool[:, 2, 1] = case.k_cache, case.v_cache
    case.k_cache, case.v_cache = pool[:, 2, 0], pool[:, 2, 1]
    return case


def _table_slice() -> Case:
    """A table that is part of a larger one, so that its rows don't follow each other."""
    case = make_case([2, 3], [50, 33])
    wide = torch.full((2, 64), 2**30, dtype=torch.int32)
    wide[:, : case.block_table.shape[1]] = case.block_table
    case.block_table = wide[:, : case.block_table.shape[1]]
    return case


def _strided_queries() -> Case:
    """q as a fused projection leaves it: a part of each token's row, heads of another stride."""
    case = make_case([4, 2], [30, 20])
    fused = torch.full((case.q.shape[0], case.q.shape[1] + 4, 96), float("nan"))
    fused[:, : case.q.shape[1], :64] = case.q
    case.q = fused[:, : case.q.shape[1], :64]
    return case


def _unlike_caches() -> Case:
    """Keys by head, values by token: what holds for one cache's strides does not for the other's."""
    case = make_case([3, 1, 2], [50, 17, 40])
    case.k_cache = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    return case


def _room_to_grow() -> Case:
    """A table with room for far more keys than there are."""
    case = make_case([1, 4], [40, 33])
    case.block_table = torch.nn.functional.pad(case.block_table, (0, 60), value=2**30)
    return case


def _star() -> Case:
    """Children of one root see it and themselves, not each other."""
    return make_case([9], [30], tree_mask=tree_of([-1] + [0] * 8))


def _tree_of_64() -> Case:
    """The sign bit of the words is a node like any other."""
    return make_case([64, 1], [70, 20], heads=(1, 1), tree_mask=torch.cat([random_tree(64), tree_of([-1])]))


def _tree_beside_prompt() -> Case:
    """A prompt of more tokens than the words have bits is causal, whatever its bits are."""
    bits = torch.full((70,), -1, dtype=torch.int64)
    return make_case([70, 5], [80, 33], heads=(1, 1), tree_mask=torch.cat([bits, random_tree(5)]))


def _very_negative() -> Case:
    """Legal scores near -1e5: only the differences matter."""
    case = make_case([2, 1], [30, 20])
    case.q, case.options["scale"] = case.q.abs() * 100, 10.0
    case.k_cache = -case.k_cache.abs()
    return case


def fp8_case(q_lens: list[int], kv_lens: list[int], dtype: torch.dtype, times: float = 1.0, **named: Any) -> Case:
    """A case with fp8 caches, its queries multiplied by `times` and its scale divided by it."""
    heads = named.setdefault("heads", (4, 2))
    scales = dict(k_scale=torch.linspace(0.5, 2, heads[1]), v_scale=torch.linspace(2, 0.5, heads[1]))
    case = to_fp8(make_case(q_lens, kv_lens, dtype=dtype, **scales, **named))
    case.q = (case.q.float() * times).to(dtype)
    case.options["scale"] = case.q.shape[-1] ** -0.5 / (times or 1)
    return case


def _empty_query(dtype: torch.dtype) -> Case:
    """A row of zeros beside large ones, whose scale is small."""
    case = fp8_case([3, 1], [50, 30], torch.bfloat16, times=1e36)
    case.q[1] = 0
    return case


def _nan_in_a_cache(dtype: torch.dtype) -> Case:
    """NaN in a slot that is no sequence's, beside the last key of one, whatever it was before."""
    case = fp8_case([2, 1], [50, 30], dtype)
    for cache in (case.k_cache, case.v_cache):
        cache.view(torch.uint8)[case.block_table[1, 1], 14:] = 0x7F
    return case


FP8_CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "several queries": lambda dtype: fp8_case([5, 1, 16], [131, 17, 64], dtype),
    "one tile is not enough": lambda dtype: fp8_case([9, 35], [70, 40], dtype, heads=(8, 1)),
    "softcap and slopes": lambda dtype: fp8_case(
        [3, 1], [50, 30], dtype, softcap=3.0, alibi_slopes=2.0 ** -torch.arange(1, 5)
    ),
    "window and sinks": lambda dtype: fp8_case([3, 5], [50, 30], dtype, window=19, sinks=torch.linspace(-1, 2, 4)),
    "a tree": lambda dtype: fp8_case([7], [40], dtype, tree_mask=random_tree(7)),
    "queries past fp16's range": lambda dtype: fp8_case([3, 1], [50, 30], torch.bfloat16, times=1e9),
    "queries below fp16's range": lambda dtype: fp8_case([3, 1], [50, 30], torch.bfloat16, times=1e-20),
    "no query but 0": lambda dtype: fp8_case([3, 1], [50, 30], dtype, times=0.0),
    "head dims 80 and 72": lambda dtype: fp8_case([3, 1], [50, 30], dtype, dims=(80, 72)),
    "odd head dim": lambda dtype: fp8_case([3, 1], [50, 30], dtype, dims=(67, 64)),
    "head dim 16": lambda dtype: fp8_case([3, 1], [50, 30], dtype, dims=(16, 16)),
    "K and V in one tensor": lambda dtype: fp8_case([3, 1], [50, 30], dtype, layout="KV"),
    "blocks of 3, HND": lambda dtype: fp8_case([3, 1], [50, 30], dtype, layout="HND", block_size=3),
    "a query of 0 near bf16's end": _empty_query,
    "tall tiles, narrower values": lambda dtype: fp8_case([9, 3], [9, 140], dtype, heads=(8, 1), dims=(72, 64)),
    "tall tiles, wider values": lambda dtype: fp8_case([9, 3], [9, 140], dtype, heads=(8, 1), dims=(40, 72)),
    "tall tiles, values of 32": lambda dtype: fp8_case([9, 3], [9, 140], dtype, heads=(8, 1), dims=(67, 32)),
    "NaN next to a sequence": _nan_in_a_cache,
}
"""fp8 caches under queries of 16 bits, which the kernel multiplies in fp16."""

FAULTS: dict[str, Callable[[], Case]] = {
    "flash-attention#828, #1720, #1171: blocks of 16": lambda: make_case([1, 3], [100, 35], block_size=16),
    "flash-attention#1579: blocks of 128": lambda: make_case([1, 3], [100, 135], block_size=128),
    "flashinfer#320: blocks of 512": lambda: make_case([2, 1], [130, 9], block_size=512),
    "aiter#2190, #2393: blocks of 784": lambda: make_case([2, 1], [97, 5], block_size=784),
    "flashinfer#725: a sequence shorter than a block": lambda: make_case([1, 2], [5, 2], block_size=64),
    "flash-attention#1314, #892: a table with a row stride": _table_slice,
    "flashinfer#506: layers inside a block": _layers_in_a_page,
    "aiter#3492, #3498: block stride isn't block_size rows": lambda: make_case([1, 3], [40, 50], layout="KV"),
    "flash-attention#1627, #660, #678: blocks of 19": lambda: make_case([2, 3], [100, 20], block_size=19),
    "flash-attention#1417: room for more keys than there are": _room_to_grow,
    "flashinfer#3800: keys and values of other strides": _unlike_caches,
    "flash-attention#2886: strided queries": _strided_queries,
    "flashinfer#941, #942: NaN past the end of a block": lambda: make_case([1, 1], [17, 33], block_size=16),
    "flash-attention#1974, vllm#47305: NaN past seq_lens": lambda: make_case([5, 2], [65, 129], block_size=64),
    "flashinfer#363: no keys": lambda: make_case([1, 1], [0, 40]),
    "flash-attention#731: a prompt with no keys": lambda: make_case([7], [0]),
    "flash-attention#1713, #2562, #2568: a sequence of no queries": lambda: make_case([0, 3, 0], [20, 30, 0]),
    "sglang#1779, #1469: rows of length 0 and 1": lambda: make_case([1, 1, 1], [0, 1, 0], padding=2),
    "flashmla#77, flashinfer#4452: lse of empty rows": lambda: make_case([3, 1], [1, 0]),
    "flashinfer#4450: scores below a finite sentinel": _very_negative,
    "flash-attention#1778: more queries than keys": lambda: make_case([9, 4], [3, 4]),
    "flash-attention#1402: several queries on a cache": lambda: make_case([6, 6], [70, 41]),
    "pytorch#108108: bottom-right, not top-left": lambda: make_case([2], [90]),
    "transformers#48296: causal though paged": lambda: make_case([20, 20], [20, 33]),
    "flashinfer#3716: bidirectional sees no padding lanes": lambda: make_case([5, 3], [37, 50], causal=False),
    "vllm#3385: window off by one": lambda: make_case([1, 1, 1], [15, 16, 17], window=16),
    "vllm#44575, flashinfer#3864: 8 queries and a window": lambda: make_case([8, 8], [100, 20], window=17),
    "flashinfer#4299, #455: head dim 96 and 72": lambda: make_case([3, 1], [50, 20], dims=(96, 72)),
    "vllm#4127, #18100: group of 7, head dim 80": lambda: make_case([3], [50], heads=(7, 1), dims=(80, 80)),
    "flashinfer#996, #140, #2684: group of 5": lambda: make_case([4, 1], [50, 40], heads=(10, 2)),
    "flashinfer#2986, #3563: group of 16": lambda: make_case([2, 1], [50, 40], heads=(16, 1)),
    "pytorch#151359, #143117: group of 3, 9 heads": lambda: make_case([4, 1], [50, 40], heads=(9, 3)),
    "vllm#39018, #43257: head dim 512": lambda: make_case([1], [40], heads=(2, 1), dims=(512, 512)),
    "vllm#48076, #57094, #57017, #38436: padded rows of a captured graph": lambda: make_case(
        [1, 0, 0], [33, 0, 0], padding=5
    ),
    "flash-attention#924, #1576: a tree": lambda: make_case([7], [40], tree_mask=random_tree(7)),
    "flashinfer#1005, #1008, #1028, #2201: a star": _star,
    "flashinfer#5271, #3176: a tree of 64": _tree_of_64,
    "sglang#39703: a tree beside a prompt": _tree_beside_prompt,
    "vllm#42580, #42080: fp8 scales of each head": lambda: to_fp8(
        make_case([3, 1], [50, 30], k_scale=torch.tensor([0.5, 2.0]), v_scale=torch.tensor([3.0, 0.25]))
    ),
}
