"""KVPool: the tensors of several models behind one space of block ids."""

import pytest
import torch

from specdec.kvpool import KVPool, KVSpec

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
CHAINS = [[(0, 1), (1, 2)], [(1, 2), (0, 1)], [(0, 1), (2, 1)], [(0, 1), (1, 0)], [(3, 3)], []]


def layers(count, heads, dim, v_dim=None, dtype=torch.float32, device="cpu"):
    return [KVSpec(layer, heads, dim, v_dim or dim, dtype, device) for layer in range(count)]


def fill(pool):
    """Give every element of every tensor its own value, as far as the dtype tells them apart; return clones."""
    tensors = [t for name in ("target", "drafter") for pair in pool.kv(name) for t in pair]
    for index, tensor in enumerate(tensors):
        values = torch.arange(tensor.numel(), device=tensor.device) * 7 + index
        tensor.copy_((values % 251 - 125).view(tensor.shape))
    return tensors, [tensor.clone() for tensor in tensors]


def same(a, b):
    return torch.equal(a.float(), b.float())


def test_models_share_blocks_and_keep_their_own_shapes():
    pool = KVPool(5, 3)
    target = pool.add_model("target", layers(2, 3, 6, 10, torch.bfloat16))
    drafter = pool.add_model("drafter", layers(1, 1, 5))
    assert [(k.shape, v.shape) for k, v in target] == [((5, 3, 3, 6), (5, 3, 3, 10))] * 2
    assert [(k.shape, v.dtype) for k, v in drafter] == [((5, 3, 1, 5), torch.float32)]
    assert all(t.is_contiguous() and not t.any() for pair in target + drafter for t in pair)
    assert [list(map(id, pair)) for pair in pool.kv("target")] == [list(map(id, pair)) for pair in target]
    assert len({t.data_ptr() for pair in target + drafter for t in pair}) == 6


def test_bytes_per_block_counts_all_models():
    pool = KVPool(5, 3)
    assert pool.bytes_per_block == 0
    specs = layers(2, 3, 6, 10, torch.bfloat16)
    tensors = [t for pair in pool.add_model("target", specs) + pool.add_model("drafter", layers(1, 1, 5)) for t in pair]
    assert pool.bytes_per_block == sum(t.numel() * t.element_size() for t in tensors) // 5
    assert KVPool.bytes_per_block_of(specs, 16) == 16 * 2 * 3 * 16 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *FLOAT8])
def test_poison_fills_new_tensors_with_nan(dtype):
    pool = KVPool(3, 5, poison=True)
    (pair,) = pool.add_model("target", layers(1, 2, 3, 4, dtype))
    assert all(t.dtype == dtype and t.float().isnan().all() for t in pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("device", DEVICES)
def test_copy_blocks_copies_all_layers_of_all_models(dtype, device):
    pool = KVPool(7, 3)
    pool.add_model("target", layers(2, 3, 6, 10, dtype, device))
    pool.add_model("drafter", layers(1, 1, 5, device=device))
    tensors, before = fill(pool)
    pool.copy_blocks([(0, 4), (2, 6)])
    for tensor, old in zip(tensors, before, strict=True):
        assert not same(old[4], old[0]) and not same(old[6], old[2])
        assert same(tensor[[4, 6]], old[[0, 2]]) and same(tensor[[0, 1, 2, 3, 5]], old[[0, 1, 2, 3, 5]])


@pytest.mark.parametrize("pairs", CHAINS)
def test_copy_blocks_acts_as_if_one_pair_after_the_other(pairs):
    pool = KVPool(5, 3)
    pool.add_model("target", layers(1, 2, 3))
    pool.add_model("drafter", layers(1, 1, 2))
    tensors, expected = fill(pool)
    for source, destination in pairs:
        for tensor in expected:
            tensor[destination] = tensor[source]
    pool.copy_blocks(pairs)
    assert all(same(a, b) for a, b in zip(tensors, expected, strict=True))


def test_copy_on_write_keeps_both_sides():
    pool = KVPool(7, 3, poison=True)
    ((k, v),) = pool.add_model("target", layers(1, 1, 1))
    table = pool.new_table()
    table.grow(5)
    for position in range(5):
        k[table.blocks[position // 3], position % 3] = position
    fork = table.fork(5)
    pool.copy_blocks([fork.make_writable(4)])
    k[fork.blocks[1], 1] = 40
    assert k[table.blocks].flatten()[:5].tolist() == [0, 1, 2, 3, 4]
    assert k[fork.blocks].flatten()[:5].tolist() == [0, 1, 2, 3, 40]
    assert v.isnan().all()


def test_tensors_made_in_inference_mode_can_be_written_outside_of_it():
    pool = KVPool(3, 2)
    with torch.inference_mode():
        ((k, _),) = pool.add_model("target", layers(1, 1, 4))
        k.fill_(2)
    k[0] = 1
    pool.copy_blocks([(0, 2)])
    assert k[2].eq(1).all()


def test_remove_model_frees_the_name_and_its_completeness():
    pool = KVPool(3, 2)
    pool.add_model("target", layers(1, 1, 4))
    pool.add_model("drafter", layers(1, 1, 2))
    (block,) = pool.allocator.allocate(1)
    pool.allocator.publish(block, "a")
    pool.allocator.mark_complete("target", block)
    pool.allocator.mark_complete("drafter", block)
    pool.remove_model("drafter")
    assert not pool.allocator.is_complete("drafter", block) and pool.allocator.is_complete("target", block)
    assert pool.allocator.is_published(block)
    assert pool.add_model("drafter", layers(1, 1, 3))[0][0].shape == (3, 2, 1, 3)
    pool.remove_model("drafter")
    pool.remove_model("target")
    assert not pool.allocator.is_published(block) and pool.bytes_per_block == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: KVPool(0, 3), "num_blocks: expected at least 1, got 0"),
        (lambda p: KVPool(3, 0), "block_size: expected at least 1, got 0"),
        (lambda p: p.add_model("target", layers(1, 1, 1)), "name: expected a model not in the pool, got 'target'"),
        (lambda p: p.add_model("other", []), "specs: expected at least one layer"),
        (lambda p: p.add_model("other", layers(1, 1, 1) * 2), r"distinct keys, got \[0, 0\]"),
        (lambda p: p.kv("other"), r"name: expected one of \['target'\], got 'other'"),
        (lambda p: p.remove_model("other"), "got 'other'"),
        (lambda p: p.copy_blocks([(0, 1), (5, 0)]), "pairs: expected blocks 0..4, got 5"),
        (lambda p: p.copy_blocks([(0, -1)]), "got -1"),
        (lambda p: layers(1, 0, 1), "num_kv_heads: expected at least 1, got 0"),
        (lambda p: layers(1, 1, 1, -2), "v_head_dim: expected at least 1, got -2"),
        (lambda p: layers(1, 1, 1, dtype=torch.int8), "dtype: expected a floating-point dtype, got torch.int8"),
    ],
)
def test_bad_input_is_refused(call, message):
    pool = KVPool(5, 3)
    pool.add_model("target", layers(1, 1, 1))
    with pytest.raises(ValueError, match=message):
        call(pool)
    assert pool.bytes_per_block == 24
