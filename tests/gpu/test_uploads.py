"""Pinned memory that is used again holds what was sent until it has arrived, however far the host is ahead."""

import torch

from specdec.uploads import _memory, send, sent


def slots() -> int:
    return sum(map(len, _memory._used.values()))


def test_nothing_is_overwritten_on_its_way():
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # some 0.1 s in which nothing is copied
    host = torch.zeros(3, 37, dtype=torch.int32)
    targets = [torch.empty(3, 37, dtype=torch.int32, device="cuda") for _ in range(50)]
    for i, target in enumerate(targets):
        host.fill_(i)
        send(host, target)
    host.fill_(-1)
    torch.cuda.synchronize()
    assert [target.unique().tolist() for target in targets] == [[i] for i in range(50)]


def test_memory_is_used_again():
    device, host = torch.device("cuda", torch.cuda.current_device()), torch.arange(1000)
    for _ in range(3):
        assert sent(host, device).tolist() == host.tolist()  # waits for it
    before = slots()
    for size in (1000, 900, 513):
        assert sent(host[:size], device).tolist() == host[:size].tolist()
    assert slots() == before
    assert sent(host[:0], device).tolist() == []
