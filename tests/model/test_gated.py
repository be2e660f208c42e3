"""Gated activations folded into the product before them: the same numbers, and nothing folded that is anything else."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from support import COMMON
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from specdec.model import attention, fusion, products
from specdec.model.gated import fold_gates
from specdec.model.layers import Folds

aten, product, gated = torch.ops.aten, torch.ops.specdec.linear, torch.ops.specdec.gated_linear
WIDTH, INNER = 20, 12
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def inputs(tokens: int = 3, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """x [1, T, in], weight [2 I, in], bias [2 I]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, tokens, WIDTH), (2 * INNER, WIDTH), (2 * INNER,))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `products.linear` does on a GPU."""
    return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


def halves(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    return linear(x, weight, bias).split([INNER, INNER], -1)


def traced(function: Callable, *args: Tensor) -> GraphModule:
    """As the inductor's passes get it: in fp32 between conversions, silu and gelu in its small operations."""
    return make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*args)


def folded(function: Callable, *args: Tensor) -> tuple[GraphModule, list[tuple]]:
    """The graph of `function` after the pass, and its gated products' arguments after x, weight and bias."""
    graph_module = traced(function, *args)
    want = graph_module(*(arg.clone() for arg in args))
    fold_gates(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    got = graph_module(*(arg.clone() for arg in args))
    nodes = graph_module.graph.find_nodes(op="call_function", target=gated.default)
    if nodes:  # rounded once, not twice: what the inductor's kernels do, but not one operation after the other
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-8)
    return graph_module, [node.args[3:] for node in nodes]


@pytest.mark.parametrize("tokens, dtype", [(1, torch.bfloat16), (3, torch.float16), (16, torch.bfloat16)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_are_folded(name, tokens, dtype):
    """Whichever half is the gate and whichever factor comes first; fused by us or by the model."""
    act = ACTIVATIONS[name]

    def gate_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        gate, up = halves(x, w, b)
        return act(gate) * up

    def gate_last(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        up, gate = linear(x, w, None).chunk(2, -1)
        return act(gate) * up

    def up_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        gate, up = product(x[0], w, bias=b).chunk(2, dim=1)
        return -(up * act(gate))

    def up_first_gate_last(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        up, gate = halves(x, w)
        return up * act(gate)

    functions = {gate_first: True, gate_last: False, up_first: True, up_first_gate_last: False}
    for function, first in functions.items():
        graph_module, found = folded(function, *inputs(tokens, dtype))
        assert found == [(name, first)]
        assert not graph_module.graph.find_nodes(op="call_function", target=product.default)
        assert not graph_module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)


def other_use_of_the_gate(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = halves(x, w)
    return F.silu(gate) * up, gate + 1


def other_use_of_up(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = halves(x, w)
    return F.silu(gate) * up, up


def other_use_of_the_activation(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = halves(x, w)
    return (y := F.silu(gate)) * up, y


def other_use_of_the_product(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = linear(x, w, b)
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up, y


def of_two_products(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(halves(x, w)[0]) * halves(x, w, b)[1]


def with_itself(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, _ = halves(x, w)
    return F.silu(gate) * gate


def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = halves(x, w)
    return F.silu(gate * 2) * up


def another_activation(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = halves(x, w)
    return F.relu(gate) * up


def with_another_constant(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = halves(x, w)
    z = gate.float()
    return (z / (z.neg().exp() + 2)).to(gate.dtype) * up


def scaled_in_the_sum(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = halves(x, w)
    z = gate.float()
    return (z / torch.add(z.neg().exp(), 1, alpha=3)).to(gate.dtype) * up


def in_fp32(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = halves(x, w)
    return F.silu(gate.float()) * up


def of_three_parts(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up, _ = linear(x, w, b).split(8, -1)
    return F.silu(gate) * up


def of_unequal_parts(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = linear(x, w, b).split([2 * INNER - 1, 1], -1)
    return F.silu(gate) * up


def with_a_column(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up, _ = linear(x, w, b).split([INNER, 1, INNER - 1], -1)
    return F.silu(gate) * up


def halves_of_the_tokens(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = linear(x[:, :2], w, b).chunk(2, 1)
    return F.silu(gate) * up


def of_another_shape(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = linear(x, w, b).view(-1, 2, INNER).chunk(2, -1)
    return F.silu(gate) * up


def with_a_residual(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = product(x[0], w, b, b.expand(3, -1).contiguous()).chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize(
    "function",
    [
        other_use_of_the_gate,
        other_use_of_up,
        other_use_of_the_activation,
        other_use_of_the_product,
        of_two_products,
        with_itself,
        scaled,
        another_activation,
        with_another_constant,
        scaled_in_the_sum,
        in_fp32,
        of_three_parts,
        of_unequal_parts,
        with_a_column,
        halves_of_the_tokens,
        of_another_shape,
        with_a_residual,
    ],
)
def test_others_are_left_alone(function):
    args = inputs()
    before = str(traced(function, *args).graph)
    graph_module, found = folded(function, *args)
    assert (found, str(graph_module.graph)) == ([], before)


def mlp(cls: str, config: str, **options: object) -> torch.nn.Module:
    """transformers' own module, its products fused and attached as in a paged model."""
    module = transformers.models
    for name in cls.split("."):
        module = getattr(module, name)
    torch.manual_seed(0)
    sizes = dict(hidden_size=WIDTH, intermediate_size=INNER)
    mlp = module(getattr(transformers, config)(**COMMON | sizes | options)).bfloat16()
    with torch.no_grad(), fusion.LinearWatch(mlp) as watch:
        mlp(torch.randn(1, 3, WIDTH).bfloat16())
    fused = fusion.fuse_linears(watch.groups())
    parts = [linear for group in fused for linear in group.linears]
    for each in [*fused, *(products.Product(linear) for linear in watch.linears() if linear not in parts)]:
        each.attach()
    return mlp


MLPS = {
    "llama": (("llama.modeling_llama.LlamaMLP", "LlamaConfig"), {}, "silu"),
    "biased": (("llama.modeling_llama.LlamaMLP", "LlamaConfig"), dict(mlp_bias=True), "silu"),
    "phi3": (("phi3.modeling_phi3.Phi3MLP", "Phi3Config"), dict(pad_token_id=0), "silu"),
    "gemma2": (("gemma2.modeling_gemma2.Gemma2MLP", "Gemma2Config"), {}, "gelu_tanh"),
    "gelu": (("llama.modeling_llama.LlamaMLP", "LlamaConfig"), dict(hidden_act="gelu"), "gelu"),
    "relu": (("llama.modeling_llama.LlamaMLP", "LlamaConfig"), dict(hidden_act="relu"), None),
}


@pytest.mark.parametrize("name", MLPS)
def test_of_a_models_mlp_the_compiler_makes_two_products(name, monkeypatch):
    """With the residual after it; in the code that it makes, with what a GPU's products are put in the place of a CPU's."""
    args, options, activation = MLPS[name]
    module = mlp(*args, **options)
    monkeypatch.setattr(fusion, "product", linear)
    monkeypatch.setattr(products, "linear", linear)
    monkeypatch.setattr(attention, "in_step", lambda: True)
    torch._dynamo.reset()

    def layer(residual: Tensor) -> Tensor:
        return residual + module(residual.sin())

    with torch.no_grad():
        compiled = torch.compile(layer, dynamic=False, options={"post_grad_custom_pre_pass": Folds()})
        x = torch.randn(1, 5, WIDTH).bfloat16()
        got, (code,) = run_and_get_code(compiled, x)
        torch.testing.assert_close(got, layer(x), rtol=2**-6, atol=2**-8)
    assert code.count("torch.ops.specdec.gated_linear.default(") == (activation is not None)
    assert code.count("torch.ops.specdec.linear.default(") == 2 - (activation is not None)
    if activation:
        assert f"'{activation}', True)" in code
        assert code.count("cpp_fused_") == code.count("cpp_fused_sin")


def test_the_compiler_keeps_what_it_compiled():
    """Compiled for the second time the code comes from the cache, whose key has the pass in it."""

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        gate, up = halves(x, w, b)
        return F.silu(gate) * up

    args = inputs()
    codes = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            compiled = torch.compile(layer, dynamic=False, options={"post_grad_custom_pre_pass": Folds()})
            got, (code,) = run_and_get_code(compiled, *args)
        assert torch.equal(got[0], gated(args[0][0], *args[1:]))
        codes.append(code)
    assert codes[0] == codes[1] and "cpp_fused" not in codes[0]
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
