"""Compiled layers: an ordinary forward is the layers' own, a copy's too, and letting go leaves nothing behind."""

import copy
import pickle

import torch
from support import tiny

from specdec.model.layers import CompiledLayers

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def changed(model):
    """The same model with other weights in its layers."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.mul_(-2)
    return model


def test_copies_of_a_model_in_use_have_layers_of_their_own():
    """A copy that ran the original's layers would give its output, silently, whatever became of the copy's weights."""
    model = copy.deepcopy(tiny())
    with torch.no_grad():
        before, wanted = model(IDS).logits, changed(copy.deepcopy(tiny()))(IDS).logits
        layers = CompiledLayers(model)
        layers.attach()
        copied, pickled = changed(copy.deepcopy(model)), changed(pickle.loads(pickle.dumps(model)))
        assert torch.equal(copied(IDS).logits, wanted) and torch.equal(pickled(IDS).logits, wanted)
        assert torch.equal(model(IDS).logits, before)
        layers.detach()
        assert torch.equal(copied(IDS).logits, wanted) and torch.equal(model(IDS).logits, before)
        assert not any("forward" in vars(module) for module in model.modules())
