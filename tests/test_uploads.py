"""Sending to the device: on a CPU nothing is copied that needn't be. What pinned memory does is in tests/gpu."""

import torch

from specdec.uploads import send, sent


def test_on_a_cpu():
    host, target = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    assert sent(host, host.device) is host
    send(host, target)
    host += 1
    assert target.tolist() == [0, 1, 2, 3, 4]
