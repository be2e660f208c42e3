"""Sums folded into the product before them: the same numbers, and nothing folded that has another user or another meaning."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from specdec.model.layers import Folds
from specdec.model.residual import fold_sums

aten, product = torch.ops.aten, torch.ops.specdec.linear
HIDDEN, WIDTH = 12, 20


def inputs(tokens: int = 3, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """x [1, T, in], weight [out, in], bias [out], residual [1, T, out]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, tokens, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (1, tokens, HIDDEN))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `products.linear` does on a GPU."""
    return product(x.reshape(-1, WIDTH), weight, bias).view(1, -1, HIDDEN)


def folded(function: Callable, *args: Tensor) -> tuple[GraphModule, int]:
    """The graph of `function` after the pass, which gives the same numbers, and how many products have a residual there."""
    graph_module = make_fx(function, tracing_mode="fake")(*args)
    want = graph_module(*(arg.clone() for arg in args))
    fold_sums(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    got = graph_module(*(arg.clone() for arg in args))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    nodes = graph_module.graph.find_nodes(op="call_function", target=product.default)
    return graph_module, sum(len(node.args) == 4 for node in nodes)


def adds(graph_module: GraphModule) -> int:
    return len(graph_module.graph.find_nodes(op="call_function", target=aten.add.Tensor))


@pytest.mark.parametrize("tokens, dtype", [(1, torch.bfloat16), (3, torch.float16), (16, torch.float32)])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b, r: r + linear(x, w, b),
        lambda x, w, b, r: linear(x, w) + r,
        lambda x, w, b, r: r[0] + linear(x, w, b).view(-1, 2, HIDDEN // 2).reshape(-1, HIDDEN),
        lambda x, w, b, r: r[0] + product(x[0], w, bias=b),
        lambda x, w, b, r: r.sin() + linear(x, w, b),
    ],
)
def test_sums_are_folded(function, tokens, dtype):
    graph_module, count = folded(function, *inputs(tokens, dtype))
    assert (count, adds(graph_module)) == (1, 0)


def test_a_layers_sums_are_both_folded():
    """The second one's residual is the first, which has another user; it is known where the second one stood."""

    def layer(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        r = r + linear(x, w)
        down = linear(r.repeat(1, 1, 2)[..., :WIDTH].sigmoid(), w, b)
        return r.tanh() * 2 + 1, r + down

    graph_module, count = folded(layer, *inputs())
    assert (count, adds(graph_module)) == (2, 1)


def test_of_two_products_one_takes_the_other():
    """As in layers whose attention and MLP run side by side: the sum of both, then the residual."""
    graph_module, count = folded(lambda x, w, b, r: linear(x, w) + linear(x.sin(), w, b) + r, *inputs())
    assert (count, adds(graph_module)) == (1, 1)


def twice(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = linear(x, w, b)
    return r + y, y.sin()


def through_two_views(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = product(x[0], w, b)
    return y.view(1, -1, HIDDEN) + y.view(1, -1, HIDDEN)


def itself(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = linear(x, w, b)
    return y + y


def overwritten(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = linear(x, w, b)
    w.zero_()
    return r + y


@pytest.mark.parametrize(
    "function",
    [
        twice,
        through_two_views,
        itself,
        overwritten,
        lambda x, w, b, r: linear(x, w, b) + 1,
        lambda x, w, b, r: linear(x, w, b) + b,
        lambda x, w, b, r: linear(x, w, b)[:, :1] + r,
        lambda x, w, b, r: linear(x, w, b).transpose(1, 2) + r.transpose(1, 2),
        lambda x, w, b, r: linear(x, w, b).float() + r,
        lambda x, w, b, r: linear(x, w, b) + r.float(),
        lambda x, w, b, r: torch.add(r, linear(x, w, b), alpha=2),
        lambda x, w, b, r: linear(x, w, b) + r.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x, w, b, r: linear(x, w, b) * r,
    ],
)
def test_others_are_left_alone(function):
    args = inputs()
    before = str(make_fx(function, tracing_mode="fake")(*args).graph)
    graph_module, count = folded(function, *args)
    assert (count, str(graph_module.graph)) == (0, before)


def test_the_compiler_folds_them_and_keeps_what_it_compiled():
    """Compiled for the second time the code comes from the cache, whose key has the pass in it."""

    def layer(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return r + linear(x, w, b)

    args = inputs()
    options = {"post_grad_custom_pre_pass": Folds()}
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            got, (code,) = run_and_get_code(torch.compile(layer, dynamic=False, options=options), *args)
        assert torch.equal(got, layer(*args))
        assert code.count("torch.ops.specdec.linear.default(") == 1 and "cpp_fused" not in code
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
