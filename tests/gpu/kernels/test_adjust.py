"""Adjusted logits natively: what the twins give on the CPU, to the bit."""

import pytest
import torch

from specdec.kernels import adjust
from tests.kernels.test_adjust import V, case, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [V, 41, 60])
@pytest.mark.parametrize("repeats", [1, 20])
def test_kernels_give_what_their_twins_give(columns, dtype, repeats):
    got, want = (
        whole(*(x.to(dtype) if i == 5 else x for i, x in enumerate(case(columns, device, columns, repeats))))
        for device in ("cuda", "cpu")
    )
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.cpu(), b)


def test_in_a_graph_what_it_reads_may_change():
    """Replayed on other counts and drafts, it gives what it gives outside of a graph."""
    columns, known, drafts, rows, positions, logits, _ = case(device="cuda", repeats=4)
    logits = logits.cuda()
    adjust(logits, positions, columns, known, drafts, rows=rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = adjust(logits, positions, columns, known, drafts, rows=rows)
    columns.counts.add_(2)
    drafts.copy_((drafts + 1) % 4)
    logits.neg_()
    graph.replay()
    assert torch.equal(out, adjust(logits, positions, columns, known, drafts, rows=rows))
