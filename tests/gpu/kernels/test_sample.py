"""sample on a GPU: the tokens of the twin on the CPU, bit for bit, over big vocabularies, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels import Sampling, sample

VOCABULARY = 128_256

KINDS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "noise": (1.0, 0, 1.0, 0.0),
    "cool": (0.3, 0, 1.0, 0.0),
    "hot": (30.0, 0, 1.0, 0.0),
    "top-k": (0.9, 50, 1.0, 0.0),
    "a large top-k": (1.0, 3000, 1.0, 0.0),
    "top-p": (0.7, 0, 0.9, 0.0),
    "a small top-p": (1.0, 0, 0.2, 0.0),
    "nearly all of top-p": (1.3, 0, 0.9999, 0.0),
    "min-p": (1.1, 0, 1.0, 0.05),
    "a small min-p": (1.5, 0, 1.0, 1e-6),
    "all filters": (0.8, 40, 0.95, 0.02),
    "all filters, wide": (1.0, 5000, 0.8, 1e-3),
}
"""Temperature, top-k, top-p and min-p."""


def parameters(rows: int, kinds: list[str]) -> Sampling:
    """The kinds in turn, each row with a seed of its own."""
    chosen = [KINDS[kinds[row % len(kinds)]] for row in range(rows)]
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*chosen, strict=True))
    return Sampling(temperature, top_k.int(), top_p, min_p, torch.arange(rows) * 2**40 - 3)


def on_gpu(sampling: Sampling) -> Sampling:
    return Sampling(*(column.cuda() for column in sampling))


def logits_of(rows: int, columns: int, scale: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


def check(logits: torch.Tensor, sampling: Sampling, **options: object) -> None:
    positions = torch.arange(logits.shape[0]) * 977 + 3
    want = sample(logits, positions, sampling, **options)
    got = sample(logits.cuda(), positions.cuda(), on_gpu(sampling), **options)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_draws_the_twins_tokens(kind: str, scale: float, dtype: torch.dtype) -> None:
    """From flat rows, where most tokens pass, to peaked ones, where few do."""
    check(logits_of(6, VOCABULARY, scale, dtype), parameters(6, [kind]))


@pytest.mark.parametrize("columns", [1, 5, 127, 129, 2049, 5001, 49_152, 151_937, 262_144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_kinds_in_one_call(columns: int, dtype: torch.dtype) -> None:
    check(logits_of(26, columns, 2.5, dtype), parameters(26, list(KINDS)))


def test_a_large_batch() -> None:
    check(logits_of(320, VOCABULARY, 3.0, torch.bfloat16), parameters(320, list(KINDS)))


def test_promises() -> None:
    logits = logits_of(8, VOCABULARY, 2.0, torch.bfloat16)
    check(logits, parameters(8, ["noise", "greedy", "hot"]), filters=False)
    check(logits, parameters(8, ["noise", "greedy"]), noise=False)


def test_ties_at_every_threshold() -> None:
    """Some thirty values in a row, so that thousands of tokens share each; zeros of both signs."""
    logits = (logits_of(13, VOCABULARY, 3.0, torch.float32)).round()
    logits[:, ::7] = -0.0
    check(logits, parameters(13, list(KINDS)))
    check(logits.bfloat16(), parameters(13, list(KINDS)))


def test_broken_rows() -> None:
    logits = logits_of(8, 40_001, 2.0, torch.bfloat16)
    logits[0, 39_000] = torch.nan
    logits[1] = -torch.inf
    logits[2], logits[7, 40_000], logits[7, 3] = torch.nan, torch.nan, torch.inf
    logits[3, :40_000] = -torch.inf
    logits[4, [31, 39_999]] = torch.inf
    logits[5, ::2] = -torch.inf
    for kind in KINDS:
        check(logits, parameters(8, [kind]))


def test_padded_columns_and_mapped_rows() -> None:
    storage = torch.full((12, 60_000), torch.nan, dtype=torch.bfloat16)
    logits = storage[::2, 9:]
    logits[:, :50_001] = logits_of(6, 50_001, 3.0, torch.bfloat16)
    rows = torch.tensor([2, 0, 7, 5, -1, 99], dtype=torch.int32)
    positions = torch.tensor([4, 5, 6, 7, -(2**31), 2**31 - 1])
    sampling = parameters(13, list(KINDS))
    want = sample(logits, positions, sampling, rows=rows, vocab_size=50_001)
    on_device = storage.cuda()[::2, 9:]
    got = sample(on_device, positions.cuda(), on_gpu(sampling), rows=rows.cuda(), vocab_size=50_001)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("filters", [True, False])
def test_a_graph_sees_new_logits_positions_and_parameters(filters: bool) -> None:
    rows = 26
    kinds = list(KINDS) if filters else ["noise", "greedy", "hot"]
    logits = torch.zeros(rows, VOCABULARY, dtype=torch.bfloat16, device="cuda")
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    sampling = on_gpu(parameters(rows, kinds))
    out = torch.zeros(rows, dtype=torch.int64, device="cuda")
    sample(logits, positions, sampling, filters=filters, out=out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, positions, sampling, filters=filters, out=out)
    for turn in range(3):
        new_logits = logits_of(rows, VOCABULARY, [0.5, 3.0, 8.0][turn], torch.bfloat16, seed=turn)
        new_positions = torch.arange(rows) + 1000 * turn
        new_sampling = parameters(rows, kinds[turn:] + kinds[:turn])
        for to, source in zip((logits, positions, *sampling), (new_logits, new_positions, *new_sampling), strict=True):
            to.copy_(source)
        graph.replay()
        assert out.tolist() == sample(new_logits, new_positions, new_sampling, filters=filters).tolist()
