"""What passes over the compiler's graph share: products of a few tokens in it, and nodes that the inductor takes."""

from __future__ import annotations

from typing import Any

from torch import ops
from torch._ops import OpOverload
from torch.fx import Graph, Node

from specdec.model.products import few_op

PRODUCT: OpOverload = few_op._opoverload
RESHAPE = ops.aten.reshape.default
_VIEWS = (ops.aten.view.default, ops.aten._unsafe_view.default, RESHAPE)


def product_and_views(value: Any) -> list[Node]:
    """`value`, what it is a view of, and so on down to a product without a residual; empty unless each has one user."""
    chain: list[Node] = []
    while isinstance(value, Node) and len(value.users) == 1:
        chain.append(value)
        if value.target is PRODUCT:
            return chain if arguments(value)[3] is None else []
        if value.target not in _VIEWS:
            return []
        value = value.args[0]
    return []


def arguments(product: Node) -> list[Any]:
    """x, weight, bias, residual."""
    given = dict(zip(("x", "weight", "bias", "residual"), product.args, strict=False)) | product.kwargs
    return [given.get(name) for name in ("x", "weight", "bias", "residual")]


def call(graph: Graph, target: OpOverload, *args: Any) -> Node:
    """A new node, with what the inductor wants to know of it: its value, and its inputs', whose strides it then keeps."""
    node = graph.call_function(target, args)
    values = tuple(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args)
    node.meta.update(val=target(*values), eager_input_vals=(values, {}))
    return node
