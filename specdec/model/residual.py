"""Residual sums of compiled layers, made by the product before them.

A decoder layer ends in `residual + product`. To the compiler the product is one opaque operation, so the sum would be a
kernel of its own: some 2 us of each layer on an H200, half of what the product takes in a small model. Here it becomes the
end of the product's kernel. It is found in the graph of operations; no model's code is known.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, ops
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Graph, Node

from specdec.model.products import few_op

_ADD, _RESHAPE = ops.aten.add.Tensor, ops.aten.reshape.default
_PRODUCT: OpOverload = few_op._opoverload
_VIEWS = (ops.aten.view.default, ops.aten._unsafe_view.default, _RESHAPE)


class ResidualSums(CustomGraphPass):
    """A pass of the inductor: every sum that a product can make becomes a part of it, the same bit for bit."""

    def __call__(self, graph: Graph) -> None:
        for add in graph.find_nodes(op="call_function", target=_ADD):
            for value, residual in (add.args, add.args[::-1]):
                chain = _product_and_views(value)
                if chain and value is not residual and _alike(add, value, residual) and not _written(chain[-1], add):
                    _fold(graph, add, chain, residual)
                    break

    def uuid(self) -> Any:
        """The compiler's cache of graphs keeps those of another version of this file apart."""
        return get_hash_for_files((__file__,))


def _product_and_views(value: Any) -> list[Node]:
    """`value`, what it is a view of, and so on down to a product without a residual; empty unless each has one user."""
    chain: list[Node] = []
    while isinstance(value, Node) and len(value.users) == 1:
        chain.append(value)
        if value.target is _PRODUCT:
            return chain if _arguments(value)[3] is None else []
        if value.target not in _VIEWS:
            return []
        value = value.args[0]
    return []


def _arguments(product: Node) -> list[Any]:
    """x, weight, bias, residual."""
    given = dict(zip(("x", "weight", "bias", "residual"), product.args, strict=False)) | product.kwargs
    return [given.get(name) for name in ("x", "weight", "bias", "residual")]


def _alike(add: Node, value: Node, residual: Any) -> bool:
    """Whether the sum is that of two tensors of one shape, dtype and device, nothing scaled, the residual contiguous."""
    values = [node.meta.get("val") for node in (add, value, residual) if isinstance(node, Node)]
    tensors = [tensor for tensor in values if isinstance(tensor, Tensor)]
    alike = len(tensors) == 3 and len({(t.shape, t.dtype, t.device) for t in tensors}) == 1
    return alike and not add.kwargs and tensors[2].is_contiguous()


def _written(product: Node, add: Node) -> bool:
    """Whether an operation between them writes to a tensor: the product, made later, might read something else."""
    node = product.next
    while node is not add:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            return True
        node = node.next
    return False


def _fold(graph: Graph, add: Node, chain: list[Node], residual: Node) -> None:
    """Put the product where the sum stood, since there the residual is known."""
    product = chain[-1]
    with graph.inserting_before(add):
        rows = _call(graph, _RESHAPE, residual, list(product.meta["val"].shape))
        folded = _call(graph, _PRODUCT, *_arguments(product)[:3], rows)
        result = _call(graph, _RESHAPE, folded, list(add.meta["val"].shape))
    add.replace_all_uses_with(result)
    for node in (add, *chain):
        graph.erase_node(node)


def _call(graph: Graph, target: OpOverload, *args: Any) -> Node:
    """A new node, with what the inductor wants to know of it: its value, and its inputs', whose strides it then keeps."""
    node = graph.call_function(target, args)
    values = tuple(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args)
    node.meta.update(val=target(*values), eager_input_vals=(values, {}))
    return node
