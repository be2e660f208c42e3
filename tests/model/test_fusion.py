"""Linear layers that are not plain, of peft, torchao and others: decoded as they are, and left as they were.

peft and torchao take seconds to import, so only the tests that need them do.
"""

import copy

import pytest
import torch
from support import tiny
from torch import nn

import specdec.hf
from specdec import LLM, SamplingParams
from specdec.kvpool import KVPool
from specdec.model import PagedModel
from specdec.model.fusion import Fused

PROMPTS = [[5] * 3, [6, 7, 8, 9, 10, 11, 12] * 3]
GREEDY = SamplingParams(max_tokens=8, temperature=0)


def decoded(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def plain(model) -> list[list[int]]:
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return [model.generate(x, attention_mask=torch.ones_like(x), **arguments)[0, x.shape[1] :].tolist() for x in ids]


def values(model) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {name: value if type(value) is torch.Tensor else value.dequantize() for name, value in state.items()}


class Scaled(nn.Linear):
    """A subclass that computes something else."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight

    def forward(self, x):
        return super().forward(x) * 0.5


def scaled():
    model = copy.deepcopy(tiny())
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.down_proj = Scaled(layer.self_attn.q_proj), Scaled(layer.mlp.down_proj)
    return model


def with_lora(*names: str):
    """A peft model with an adapter of each name; the first one is active."""
    import peft

    torch.manual_seed(0)
    places = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "lora_alpha": 32}
    model = peft.get_peft_model(copy.deepcopy(tiny()), peft.LoraConfig(r=4, **places), names[0])
    for name in names[1:]:
        model.add_adapter(name, peft.LoraConfig(r=4, **places))
    return model.eval()


def quantised():
    """Weights of q_proj and down_proj as int8, in tensors of torchao's own class within nn.Linear."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = copy.deepcopy(tiny())
    quantize_(model, Int8WeightOnlyConfig(), lambda m, name: name.endswith(("q_proj", "k_proj", "down_proj")))
    return model


MAKERS = {"scaled": scaled, "lora": lambda: with_lora("one").get_base_model(), "torchao": quantised}


@pytest.mark.parametrize("kind", MAKERS)
def test_other_layers_than_plain_ones_stay_as_they_are(kind):
    """With an unadapted drafter, too; what is plain beside them is fused."""
    model = MAKERS[kind]()
    want, before = plain(model), values(model)
    q_proj = model.model.layers[0].self_attn.q_proj
    with LLM(model, drafter=copy.deepcopy(tiny()), max_model_len=64) as llm:
        fused = [linear for p in llm.engine.target.products if isinstance(p, Fused) for linear in p.linears]
        assert fused and "forward" not in vars(q_proj) and not set(q_proj.modules()) & set(fused)
        assert decoded(llm) == want
    with specdec.hf.enable(model, drafter="lookup") as enabled:
        assert plain(model) == want and enabled.stats.emitted
    assert plain(model) == want
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


def test_adapters_are_switched():
    """By the next call of the plug-in, also where prefixes are kept; by `reset_prefix_cache` of an LLM."""
    model = with_lora("one", "two")
    base, want = model.get_base_model(), {}
    for name in ("one", "two"):
        model.set_adapter(name)
        want[name] = plain(model)
    with model.disable_adapter():
        assert plain(model) == plain(tiny()) and want["one"] != want["two"] != plain(tiny())
    with specdec.hf.enable(base, plain=True, prefix_cache=True):
        for name in ("one", "two", "one"):
            model.set_adapter(name)
            assert plain(model) == want[name]
        with model.disable_adapter():
            assert plain(model) == plain(tiny())
    with LLM(base, max_model_len=64) as llm:
        for name in ("one", "two"):
            model.set_adapter(name)
            llm.reset_prefix_cache()
            assert decoded(llm) == want[name]


def test_a_switched_adapter_makes_captured_rounds_stale():
    model = with_lora("one", "two")
    paged = PagedModel(model.get_base_model(), KVPool(8, 4), "target")
    assert not paged.refresh()
    model.set_adapter("two")
    assert paged.refresh() and not paged.refresh()
    with model.disable_adapter():
        assert paged.refresh()
    paged.close()
