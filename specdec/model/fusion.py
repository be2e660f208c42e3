"""Products that share an input become one: q, k, v and gate, up, found by watching a forward, not by their names.

The original weights stay, as row views of the fused tensor, so state_dict, saving and training see what they saw before.
Only within a paged forward are the fused products used; ordinary forwards of the model run as they always did.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specdec.model import attention
from specdec.model.products import linear as product


class Fused:
    """Linear modules of one input: the first one called runs the product of all, the others take their part of it."""

    def __init__(self, linears: list[nn.Linear]):
        self.linears = linears
        self.sizes = [linear.out_features for linear in linears]
        with torch.no_grad():
            self.weight = torch.cat([linear.weight for linear in linears])
            self.bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def attach(self) -> None:
        for i, (linear, weight) in enumerate(zip(self.linears, self.weight.split(self.sizes), strict=True)):
            linear.weight.data = weight
            if self.bias is not None:
                linear.bias.data = self.bias.split(self.sizes)[i]
            linear.forward = _Part(self, i).forward  # type: ignore[method-assign, assignment]

    def refresh(self) -> None:
        """Take in weights that were put in the place of the views: `weight.data = new`, or a state dict by assignment."""
        for i, (linear, weight) in enumerate(zip(self.linears, self.weight.split(self.sizes), strict=True)):
            if linear.weight.data_ptr() != weight.data_ptr():
                weight.copy_(linear.weight.data)
                linear.weight.data = weight
            if self.bias is not None and linear.bias.data_ptr() != (bias := self.bias.split(self.sizes)[i]).data_ptr():
                bias.copy_(linear.bias.data)
                linear.bias.data = bias

    def detach(self) -> None:
        for linear in self.linears:
            del linear.forward
            linear.weight.data = linear.weight.data.clone()
            if linear.bias is not None:
                linear.bias.data = linear.bias.data.clone()

    def part(self, i: int, x: Tensor) -> Tensor:
        """What linear module i gives for `x` in a paged forward."""
        if self._input is not x:
            self._input, self._parts = x, product(x, self.weight, self.bias).split(self.sizes, -1)
        part = self._parts[i]
        if i == len(self.sizes) - 1:
            self._input, self._parts = None, ()  # hold no activations between layers
        return part


class _Part:
    """The forward of one of the linear modules: a bound method, so that a deep copy of the model has its own."""

    def __init__(self, fused: Fused, i: int):
        self.fused, self.i = fused, i

    def forward(self, x: Tensor) -> Tensor:
        if attention.in_step():
            return self.fused.part(self.i, x)
        linear = self.fused.linears[self.i]
        return F.linear(x, linear.weight, linear.bias)


def fuse_linears(groups: list[list[nn.Linear]]) -> list[Fused]:
    """Fuse each group of linear modules; a group whose fused product differs on random input is left as it was."""
    done = []
    for linears in groups:
        generator = torch.Generator().manual_seed(0)  # a caller's own random numbers stay as they were
        probe = torch.randn(3, linears[0].in_features, generator=generator).to(linears[0].weight)
        with torch.no_grad():
            before = [linear(probe) for linear in linears]
            fused = Fused(linears)
            fused.attach()
            after = F.linear(probe, fused.weight, fused.bias).split(fused.sizes, -1)
        if all(torch.allclose(a, b, rtol=2e-2, atol=1e-3) for a, b in zip(before, after, strict=True)):
            done.append(fused)
        else:
            fused.detach()
    return done


class LinearWatch:
    """Notes, during a forward, which plain linear modules of one parent are given the very same input tensor."""

    def __init__(self, model: nn.Module):
        self._parents = {child: parent for parent in model.modules() for child in parent.children()}
        self._seen: list[tuple[Tensor, nn.Linear]] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> LinearWatch:
        self._hooks = [m.register_forward_pre_hook(self._note) for m in self._parents if _is_plain(m)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, linear: nn.Module, args: tuple) -> None:
        if len(args) == 1 and isinstance(linear, nn.Linear):
            self._seen.append((args[0], linear))

    def linears(self) -> list[nn.Linear]:
        """Every plain linear module that the forward called."""
        return list(dict.fromkeys(linear for _, linear in self._seen))

    def groups(self) -> list[list[nn.Linear]]:
        """The groups of two modules and more that can be fused."""
        together: dict[tuple, list[nn.Linear]] = {}
        for x, linear in self._seen:
            w = linear.weight
            key = (id(x), self._parents[linear], w.dtype, w.device, linear.bias is None, w.requires_grad)
            together.setdefault(key, []).append(linear)
        calls = [linear for _, linear in self._seen]
        return [g for g in together.values() if len(g) > 1 and all(calls.count(linear) == 1 for linear in g)]


def _is_plain(module: nn.Module) -> bool:
    """Exactly nn.Linear with nothing attached: no hook, adapter or replaced forward, and no weight of another kind.

    Quantisers such as torchao leave the module and put a tensor of a class of their own in the place of its weight.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return (
        type(module) is nn.Linear
        and all(type(parameter) is nn.Parameter for parameter in module.parameters())
        and not any(hooks)
        and "forward" not in vars(module)
        and not vars(module).get("parametrizations")
    )
