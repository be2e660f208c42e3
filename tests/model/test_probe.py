"""The probe picks the fastest right route for an architecture, and names the reason where none is right."""

import copy

import pytest
import torch
import transformers
from architectures import APART, GATHERED, PAGED, REFUSED, model_of
from support import tiny
from torch import nn

from specdec.model import probe
from specdec.model.shrink import POSITIONS, shrunk

ROUTES = [*((0, name) for name in PAGED), *((1, name) for name in GATHERED), *((2, name) for name in APART)]
RIGHT = {**PAGED, **GATHERED, **APART}


@pytest.mark.parametrize(("route", "name"), ROUTES)
def test_the_fastest_right_route(route, name):
    model = model_of(RIGHT[name]())
    assert probe.verdict_of(model).route == route
    assert probe.route_of(model).name == probe.ROUTE_NAMES[route]


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_route_serves_is_refused_with_the_reason(name):
    model = model_of(REFUSED[name]())
    with pytest.raises(ValueError, match=f"model: {type(model).__name__} can't be paged: .{{20,}}"):
        probe.route_of(model)


class Shift(nn.Module):
    """Mixes each token's state with the one before it, like a convolution that no config mentions."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x, *args, **kwargs):
        return self.inner(x + x.roll(1, 1), *args, **kwargs)


class Mixing(transformers.LlamaForCausalLM):
    """What code that comes with a checkpoint may be."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp = Shift(self.model.layers[0].mlp)


def test_what_no_list_foresees_is_refused():
    model = Mixing(copy.deepcopy(tiny().config)).eval()
    with pytest.raises(ValueError, match="Mixing can't be paged: its logits on blocks differ from its own by"):
        probe.route_of(model)


class ThreeLayersConfig(transformers.LlamaConfig):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if self.num_hidden_layers != 3:
            raise ValueError("expected three layers")


class ThreeLayers(transformers.LlamaForCausalLM):
    config_class = ThreeLayersConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_cannot_be_shrunk_is_probed_itself(dtype):
    values = {**tiny().config.to_dict(), "num_hidden_layers": 3}
    model = ThreeLayers(ThreeLayersConfig(**values)).to(dtype).eval()
    with pytest.raises(ValueError, match="three layers"):
        probe.small_model(type(model), model.config)
    assert probe.verdict_of(model).route == 0
    mixing = copy.deepcopy(model)
    mixing.model.layers[0].mlp = Shift(mixing.model.layers[0].mlp)
    assert probe.try_routes(mixing).route is None


def test_the_probe_leaves_nothing_behind(monkeypatch):
    """No draw from the caller's generators, no change of the model or its config, nothing attached; and it is kept."""
    model = copy.deepcopy(tiny("gemma3"))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config, state = model.config.to_dict(), torch.get_rng_state()
    monkeypatch.setattr(probe, "_verdicts", {})
    verdict = probe.verdict_of(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not [m for m in model.modules() if "specdec_kv" in vars(m)]
    monkeypatch.setattr(probe, "try_routes", lambda _: pytest.fail("probed again"))
    assert probe.verdict_of(copy.deepcopy(model)) is verdict


def test_a_failure_from_outside_is_not_kept(monkeypatch):
    """One model that could not be tried, because memory ran out, leaves its architecture open."""

    def no_memory(model, route):
        raise MemoryError("none left")

    model = copy.deepcopy(tiny("llama"))
    monkeypatch.setattr(probe, "_verdicts", {})
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_difference", no_memory)
        with pytest.raises(ValueError, match="none left"):
            probe.route_of(model)
    assert isinstance(probe.route_of(model), probe.HookedRoute)


def test_shrunk_configs_keep_every_kind_of_layer():
    config = transformers.Gemma3TextConfig()
    small = shrunk(config)
    assert set(small.layer_types) == set(config.layer_types)
    assert len(small.layer_types) == small.num_hidden_layers <= 8
    assert small.sliding_window < 16 and small.max_position_embeddings == POSITIONS
    assert config.num_hidden_layers == transformers.Gemma3TextConfig().num_hidden_layers
