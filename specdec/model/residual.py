"""Residual sums of compiled layers, made by the product before them.

A decoder layer ends in `residual + product`. To the compiler the product is one opaque operation, so the sum would be a
kernel of its own: some 2 us of each layer on an H200, half of what the product takes in a small model. Here it becomes the
end of the product's kernel. It is found in the graph of operations; no model's code is known.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, ops
from torch._ops import OpOverload
from torch.fx import Graph, Node

from specdec.model.folding import PRODUCT, RESHAPE, arguments, call, product_and_views

_ADD = ops.aten.add.Tensor


def fold_sums(graph: Graph) -> None:
    """Every sum that a product can make becomes a part of it, the same bit for bit."""
    for add in graph.find_nodes(op="call_function", target=_ADD):
        for value, residual in (add.args, add.args[::-1]):
            chain = product_and_views(value)
            if chain and value is not residual and _alike(add, value, residual) and not _written(chain[-1], add):
                _fold(graph, add, chain, residual)
                break


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
        rows = call(graph, RESHAPE, residual, list(product.meta["val"].shape))
        folded = call(graph, PRODUCT, *arguments(product)[:3], rows)
        result = call(graph, RESHAPE, folded, list(add.meta["val"].shape))
    add.replace_all_uses_with(result)
    for node in (add, *chain):
        graph.erase_node(node)
