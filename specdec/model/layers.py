"""A decoder's modules compiled one by one: one layer's code serves them all, so a new shape costs about a second.

Only a paged forward of a shape that asks for it runs the compiled code; every other forward runs the layers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph
from transformers import PreTrainedModel

from specdec.model import attention, folding, gated, residual


class Folds(CustomGraphPass):
    """A pass of the inductor: what follows a product of a few tokens becomes a part of it, where a kernel can do that."""

    def __call__(self, graph: Graph) -> None:
        gated.fold_gates(graph)
        residual.fold_sums(graph)

    def uuid(self) -> Any:
        """The compiler's cache of graphs keeps those of another version of these files apart."""
        return get_hash_for_files((__file__, folding.__file__, gated.__file__, residual.__file__))


_OPTIONS = {"combo_kernels": True, "triton.enable_pdl": True, "post_grad_custom_pre_pass": Folds()}
"""Of the inductor: one launch for small kernels that don't depend on each other, such as the rotations of q and k;
kernels that start while the one before them ends, where the device can (see kernels/dependent.py); and a pass of our own."""

_SHAPES = 128
"""Compiled shapes that one layer class may have; dynamo gives up on a function after eight by default."""


class CompiledLayers:
    """The decoder layers of `model` behind torch.compile, and what runs around them: embedding, rotary angles, last norm.

    Those are small, but a dozen kernels each where they run step by step, as long as two layers together.
    """

    def __init__(self, model: PreTrainedModel):
        self.modules = _decoder_modules(model)
        self.options = _OPTIONS if model.device.type == "cuda" else None

    def attach(self) -> None:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _SHAPES)
        for module in self.modules:
            module.forward = _either(module, self.options)

    def detach(self) -> None:
        for module in self.modules:
            del module.forward


def _either(module: nn.Module, options: dict[str, Any] | None) -> Callable[..., Any]:
    """A method, since a copy of the module binds it to itself: a function would go on running the original's layers."""
    plain = module.forward
    compiled = torch.compile(plain, dynamic=False, options=options)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module:
            return type(self).forward(self, *args, **kwargs)
        return compiled(*args, **kwargs) if attention.in_compiled_step() else plain(*args, **kwargs)

    return MethodType(forward, module)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers: the list of modules that is as long as the config has layers; empty if there is none."""
    base, count = model.base_model, model.config.get_text_config().num_hidden_layers
    found = (m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return list(next(found, ()))


def _decoder_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, and the base's other parts."""
    layers = decoder_layers(model)
    around = (m for m in model.base_model.children() if not isinstance(m, (nn.ModuleList, nn.ModuleDict)))
    return [*layers, *(m for m in around if layers and layers[0] not in m.modules())]
