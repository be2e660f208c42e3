"""Gated activations of compiled layers, made by the product before them.

A gated MLP begins with `activation(gate) * up`, where gate and up are the halves of one product (`model/fusion.py`, or the
model's own). To the compiler the product is one opaque operation, so the rest would be a kernel of its own: 1.8 us of each
layer of a small model on an H200. Here it becomes the end of the product's kernel. It is found in the graph of
operations, by what the inductor makes of torch's activations; no model's code is known.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import ops
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, Match
from torch._ops import OpOverload
from torch.fx import Graph, Node

from specdec.model.folding import RESHAPE, arguments, call, product_and_views
from specdec.model.products import gated_op

_GATED: OpOverload = gated_op._opoverload
_ADD, _MUL, _CONVERT = ops.aten.add.Tensor, ops.aten.mul.Tensor, ops.prims.convert_element_type.default
_SPLITS = (ops.aten.split_with_sizes.default, ops.aten.split.Tensor)


def _silu() -> CallFunction:
    x = _gate(users=2)
    e = CallFunction(ops.aten.exp.default, CallFunction(ops.aten.neg.default, x))
    return CallFunction(ops.aten.div.Tensor, x, CallFunction(_ADD, e, 1))


def _gelu() -> CallFunction:
    x = _gate(users=2)
    erf = CallFunction(ops.aten.erf.default, CallFunction(_MUL, x, 0.7071067811865476))
    return CallFunction(_MUL, CallFunction(_MUL, x, 0.5), CallFunction(_ADD, erf, 1))


def _gelu_tanh() -> CallFunction:
    x = _gate(users=4)
    cube = CallFunction(_MUL, CallFunction(_MUL, x, x), x)
    inner = CallFunction(_MUL, CallFunction(_ADD, x, CallFunction(_MUL, cube, 0.044715)), 0.7978845608028654)
    tanh = CallFunction(ops.aten.tanh.default, inner)
    return CallFunction(_MUL, CallFunction(_MUL, x, 0.5), CallFunction(_ADD, tanh, 1))


def _gate(users: int) -> CallFunction:
    return CallFunction(_CONVERT, KeywordArg("gate"), torch.float32, _users=users)


def _patterns() -> Iterator[tuple[str, CallFunction]]:
    """Each activation, as `kernels/gated.py` computes it, times up, which may come first."""
    for name, activation in dict(silu=_silu(), gelu=_gelu(), gelu_tanh=_gelu_tanh()).items():
        factors = CallFunction(_CONVERT, activation, KeywordArg("dtype")), KeywordArg("up")
        yield name, CallFunction(_MUL, *factors)
        yield name, CallFunction(_MUL, *factors[::-1])


_PATTERNS = tuple(_patterns())


def fold_gates(graph: Graph) -> None:
    """Every `activation(gate) * up` that a product can make becomes a part of it, the same bit for bit."""
    for mul in graph.find_nodes(op="call_function", target=_MUL):
        for activation, pattern in _PATTERNS:
            match = pattern.match(mul)
            if isinstance(match, Match) and (chain := _halves_and_product(match)):
                _fold(graph, match, chain, activation)
                break


def _halves_and_product(match: Match) -> list[Node]:
    """The gate, up, and what they are the two halves of, down to the product; empty if they are anything else."""
    gate, up = match.kwargs["gate"], match.kwargs["up"]
    if any(node.kwargs for node in match.nodes) or not (_is_part(gate) and _is_part(up)):
        return []
    (split, i), (other, j) = gate.args, up.args
    chain = product_and_views(split.args[0])
    if split is not other or {i, j} != {0, 1} or len(split.users) != 2 or not chain:
        return []
    first, second, whole, product = (node.meta["val"] for node in (gate, up, chain[0], chain[-1]))
    halves = 2 * first.shape[-1] == 2 * second.shape[-1] == whole.shape[-1] == product.shape[-1]
    return [gate, up, split, *chain] if halves and match.kwargs["dtype"] == product.dtype else []


def _is_part(node: Any) -> bool:
    """Whether `node` is one of several parts of a value, of no other use than the one that was matched."""
    if not isinstance(node, Node) or node.target is not operator.getitem or len(node.users) != 1:
        return False
    whole: Any = node.args[0]
    return whole.target in _SPLITS


def _fold(graph: Graph, match: Match, chain: list[Node], activation: str) -> None:
    """Put the new product where the old one stood."""
    gate, product, mul = chain[0], chain[-1], match.output_node()
    with graph.inserting_before(product):
        gated = call(graph, _GATED, *arguments(product)[:3], activation, gate.args[1] == 0)
        result = call(graph, RESHAPE, gated, list(mul.meta["val"].shape))
    mul.replace_all_uses_with(result)
    match.erase_nodes()
    for node in chain:
        graph.erase_node(node)
