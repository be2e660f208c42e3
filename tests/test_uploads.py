"""Sending to the device: on a CPU nothing is copied that needn't be. What pinned memory does is in tests/gpu."""

import pytest
import torch

from specdec.uploads import in_bytes, send, sent


def test_on_a_cpu():
    host, target = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    assert sent(host, host.device) is host
    send(host, target)
    host += 1
    assert target.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_tensor(dtype):
    host = torch.randint(0, 2, (3, 7, 5)).to(dtype)
    for part in (host, host[:, 2:4], host[0, 0, 0], host.transpose(0, 2)):
        memory = torch.empty(part.nbytes, dtype=torch.uint8)
        memory.numpy()[:] = in_bytes(part)
        assert torch.equal(memory.view(part.dtype).view(part.shape), part)
