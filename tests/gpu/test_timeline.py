"""What the profiler tells of this device: copies by direction and size, the work of a section, and rounds that copy nothing."""

import pytest
import torch

from specdec.bench.benchmark import Benchmark
from specdec.bench.settings import Settings
from specdec.bench.timeline import MARK, Timeline


def recorded(work):
    work()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return Timeline.of(profile)


def test_copies_and_sections():
    x = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    y, home = torch.empty_like(x), torch.empty(1000, dtype=torch.uint8, pin_memory=True)

    def work():
        y.copy_(x)
        home.copy_(x[:1000], non_blocking=True)
        x[:500].copy_(home[:500], non_blocking=True)
        with torch.profiler.record_function(f"{MARK}run"), torch.profiler.record_function(f"{MARK}extend"):
            torch.mul(y, 3, out=y)

    line = recorded(work)
    copied = line.copied(1)
    assert (copied.on_device, copied.to_host, copied.from_host) == (1 << 20, 1000, 500)
    assert [w.part for w in line.works if not w.bytes] == ["extend"]
    assert 0 < line.busy_us("extend") < line.busy_us() <= line.whole_us


def test_a_graph_is_one_launch():
    x, graph = torch.zeros(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    x.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(5):
            x.add_(1)
    line = recorded(graph.replay)
    assert len(line.works) == 5 and len({w.launch for w in line.works}) == 1 and line.waiting_us == 0


@pytest.mark.parametrize("graphs", [True, False])
def test_rounds_copy_no_kv(graphs):
    """Rolling back included: a round with drafts copies nothing within the device, and a few numbers to and from the host."""
    settings = Settings(
        "tiny", "tiny", methods=("plain", "draft"), k=(3,), batch=(2,), random_weights=True, input_lens=(40,), output_len=160,
        runs=1, acceptance_length=2.5, graphs=graphs, compile=False, dtype="float32", device="cuda",
    )  # fmt: skip
    bench = Benchmark(settings)
    document = bench.run()
    bench.close()
    assert document.failures == [] and document.warnings == []
    for r in document.results:
        assert r.split is not None and r.split.copied is not None
        assert r.split.copied.on_device == 0, r.split.copied.line
        assert 0 < r.split.copied.to_host < 1000
        assert r.split.verify_ms > 0 and (r.split.draft_ms > 0) == (r.method == "draft")
