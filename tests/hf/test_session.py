"""The engine between calls: it follows the calls' sizes, and no call meets what an earlier one left."""

import copy

import pytest
import torch
from hf.prompts import batch, own
from support import tiny
from transformers.generation import StoppingCriteria

import specdec.hf
from specdec.hf.session import evaluating

GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def model():
    return copy.deepcopy(tiny("llama"))


def train(model, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    ids = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_training_step_between_two_calls(model, prefix_cache):
    twin = copy.deepcopy(model)
    with specdec.hf.enable(model, plain=True, prefix_cache=prefix_cache, block_size=4) as enabled:
        assert torch.equal(model.generate(**batch(), **GREEDY), own())
        engine = enabled.session.engine
        train(model)
        train(twin)
        want = twin.generate(**batch(), **GREEDY)
        assert not torch.equal(want, own()), "the step must change the text, or this shows nothing"
        assert torch.equal(model.generate(**batch(), **GREEDY), want)
        assert enabled.session.engine is engine
    for (name, trained), (_, twins) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.allclose(trained, twins, atol=1e-6), name


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_prefixes_are_reused_between_calls_only_if_asked(model, prefix_cache):
    with specdec.hf.enable(model, plain=True, prefix_cache=prefix_cache, block_size=4) as enabled:
        model.generate(**batch(), **GREEDY)
        first = enabled.stats.prompt_tokens
        assert torch.equal(model.generate(**batch(), **GREEDY), own())
        again = enabled.stats.prompt_tokens - first
    assert again < first // 3 if prefix_cache else again == first


def test_rows_with_one_beginning_extend_it_once(model):
    ids = torch.randint(1, 97, (1, 41), generator=torch.Generator().manual_seed(1)).repeat(6, 1)
    ids[:, -1] = torch.arange(1, 7)
    with specdec.hf.enable(model, plain=True, block_size=4) as enabled:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        assert enabled.stats.prompt_tokens < 2 * 41
    assert torch.equal(out, own(inputs={"input_ids": ids, "attention_mask": torch.ones_like(ids)}))


def test_growing_calls_rebuild_seldom(model):
    engines = []
    with specdec.hf.enable(model, plain=True) as enabled:
        for lengths in [(3,), (3, 4), (5, 3), (2, 9, 4), (8, 8, 8, 8), (40, 3), (7,), (30, 30, 30, 30)]:
            inputs = batch(lengths)
            assert torch.equal(model.generate(**inputs, **GREEDY), own(inputs=inputs))
            engines.append(enabled.session.engine)
    assert len({id(engine) for engine in engines}) <= 5
    assert engines[-3] is engines[-2], "a smaller call uses what is there"


def test_given_sizes_are_kept(model):
    with specdec.hf.enable(model, plain=True, max_rows=3, max_model_len=40, kv_memory=1 << 20, block_size=4) as enabled:
        assert torch.equal(model.generate(**batch(), **GREEDY), own())
        limits, engine = enabled.session.llm.limits, enabled.session.engine
        assert (limits.max_rows, limits.max_model_len, limits.block_size) == (3, 40, 4)
        model.generate(**batch((5,) * 7), **GREEDY)
        assert enabled.session.engine is engine
        with pytest.warns(UserWarning, match="max_new_tokens=30: a row could reach 49 tokens, expected at most 40"):
            model.generate(**batch(), do_sample=False, max_new_tokens=30)


def test_little_memory_makes_rows_wait_and_changes_nothing(model):
    one = 2 * 2 * 2 * 16 * 4 * 4  # bytes of a block: K and V of 2 layers, 2 heads of 16, 4 slots, fp32
    with specdec.hf.enable(model, plain=True, kv_memory=12 * one, block_size=4) as enabled:
        assert torch.equal(model.generate(**batch(), **GREEDY), own())
        assert enabled.session.llm.limits.num_blocks == 12


def test_a_model_in_training_mode(model):
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    with specdec.hf.enable(model, plain=True):
        assert torch.equal(model.generate(**batch(), **GREEDY), own())
        assert [module.training for module in model.modules()] == modes
    with evaluating([model]):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes


def test_within_inference_mode_and_outside_of_it(model):
    with specdec.hf.enable(model, plain=True):
        with torch.inference_mode():
            assert torch.equal(model.generate(**batch(), **GREEDY), own())
        assert torch.equal(model.generate(**batch(), **GREEDY), own())
        train(model)
        with torch.inference_mode():
            model.generate(**batch((5, 9)), **GREEDY)


def test_moved_and_replaced_weights(model):
    """A fused product holds its weights; weights that were given other storage since must not meet it."""
    with specdec.hf.enable(model, plain=True):
        model.generate(**batch(), **GREEDY)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.flip(0)
        twin = copy.deepcopy(tiny("llama"))
        for layer in twin.model.layers:
            layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.flip(0)
        assert torch.equal(model.generate(**batch(), **GREEDY), twin.generate(**batch(), **GREEDY))
        model.double().float()
        assert torch.equal(model.generate(**batch(), **GREEDY), twin.generate(**batch(), **GREEDY))


def test_a_failing_row_raises_and_the_next_call_is_well(model):
    with specdec.hf.enable(model, plain=True):
        with torch.no_grad():
            kept = model.lm_head.weight.clone()
            model.lm_head.weight.fill_(float("nan"))
            with pytest.raises(FloatingPointError, match="NaN"):
                model.generate(**batch(), **GREEDY)
            model.lm_head.weight.copy_(kept)
        assert torch.equal(model.generate(**batch(), **GREEDY), own())


def test_disabling_a_model_that_decodes_is_refused(model):
    class Disabling(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            specdec.hf.disable(model)

    with specdec.hf.enable(model, plain=True):
        with pytest.raises(RuntimeError, match="is decoding"):
            model.generate(**batch(), **GREEDY, stopping_criteria=[Disabling()])
        assert torch.equal(model.generate(**batch(), **GREEDY), own())


def test_calls_of_several_kinds_in_turn(model):
    near = copy.deepcopy(tiny("llama", noise=0.01))
    with specdec.hf.enable(model, plain=True) as enabled:
        for _ in range(2):
            for kwargs in ({"assistant_model": near}, {}, {"prompt_lookup_num_tokens": 3}, {}):
                assert torch.equal(model.generate(**batch(), **GREEDY, **kwargs), own())
                drafter = enabled.session.drafter
        assert drafter == "lookup", "a call without drafts runs on the engine that is there"
