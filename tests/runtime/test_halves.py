"""The backward graph in two halves: together they make what the whole makes, and each only its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from drumline.runtime.backward.halves import Halves, halves
from some import some

pytestmark = pytest.mark.torch
aten: Any = torch.ops.aten


def traced(function: Callable[..., Any], *arguments: Tensor) -> GraphModule:
    made: GraphModule = make_fx(function)(*arguments)
    return made


def together(cut: Halves, arguments: Sequence[Tensor]) -> list[Any]:
    """Run both halves as a backward does."""
    found: list[Any] = [None] * cut.num_outputs
    made = cut.input(*arguments)
    for place, value in zip(cut.inputs, made, strict=False):
        found[place] = value
    left = [*(arguments[place] for place in cut.kept_at), *made[len(cut.inputs) :]]
    for place, value in zip(cut.weights, cut.weight(*left), strict=True):
        found[place] = value
    return found


def operators(half: GraphModule) -> list[str]:
    return [str(node.target) for node in half.graph.nodes if node.op == "call_function"]


def test_a_chain_of_products_keeps_what_lies_between() -> None:
    def backward(x: Tensor, h: Tensor, first: Tensor, second: Tensor, g: Tensor) -> Any:
        inner = g.mm(second) * h.cos()
        return inner.mm(first), inner.t().mm(x), g.t().mm(h)

    torch.manual_seed(0)
    arguments = [torch.randn(shape) for shape in ((5, 2), (5, 3), (3, 2), (4, 3), (5, 4))]
    whole = traced(backward, *arguments)
    cut = halves(whole, weights=[1, 2])
    assert operators(cut.input) == ["aten.mm.default", "aten.cos.default", "aten.mul.Tensor", "aten.mm.default"]
    assert operators(cut.weight) == ["aten.t.default", "aten.mm.default"] * 2
    assert cut.kept_at == (0, 1, 4)
    for value, other in some(zip(together(cut, arguments), backward(*arguments), strict=True)):
        assert torch.equal(value, other)


def test_an_operator_for_both_halves_runs_in_each_for_its_own() -> None:
    def backward(x: Tensor, weight: Tensor, g: Tensor) -> Any:
        return aten.convolution_backward(g, x, weight, [4], [1], [1], [1], False, [0], 1, [True, True, True])

    torch.manual_seed(0)
    arguments = [torch.randn(2, 3, 8), torch.randn(4, 3, 3), torch.randn(2, 4, 8)]
    cut = halves(traced(backward, *arguments), weights=[1, 2])
    for half, mask in ((cut.input, [True, False, False]), (cut.weight, [False, True, True])):
        (node,) = (source for source in half.graph.nodes if source.target is aten.convolution_backward.default)
        assert list(node.args[-1]) == mask
    for value, other in zip(together(cut, arguments), backward(*arguments), strict=True):
        torch.testing.assert_close(value, other)


def test_what_an_operator_of_the_first_half_makes_besides_is_kept() -> None:
    def backward(x: Tensor, weight: Tensor, mean: Tensor, deviation: Tensor, g: Tensor) -> Any:
        return aten.native_batch_norm_backward(
            g, x, weight, None, None, mean, deviation, True, 1e-5, [True, True, True]
        )

    torch.manual_seed(0)
    x = torch.randn(5, 3)
    arguments = [x, torch.randn(3), x.mean(0), x.var(0, correction=0).rsqrt(), torch.randn(5, 3)]
    cut = halves(traced(backward, *arguments), weights=[1, 2])
    assert operators(cut.weight) == []
    for value, other in some(zip(together(cut, arguments), backward(*arguments), strict=True)):
        assert torch.equal(value, other)


def test_views_are_made_again_rather_than_kept() -> None:
    def backward(x: Tensor, g: Tensor) -> Any:
        flat = x.reshape(-1, 2)
        turned = flat.t()
        return turned.mm(g) * 2, turned.mm(g.cos())

    arguments = [torch.randn(2, 3, 2), torch.randn(6, 4)]
    cut = halves(traced(backward, *arguments), weights=[1])
    names = [node.name for node in cut.weight.graph.nodes if node.op == "placeholder"]
    assert names == ["x_1", "g_1"]
    for value, other in some(zip(together(cut, arguments), backward(*arguments), strict=True)):
        assert torch.equal(value, other)


def test_random_numbers_are_drawn_in_the_first_half() -> None:
    def backward(x: Tensor, g: Tensor) -> Any:
        return g * 2, g.t().mm(x) * torch.rand(3, 2)

    arguments = [torch.randn(5, 2), torch.randn(5, 3)]
    cut = halves(traced(backward, *arguments), weights=[1])
    assert any("rand" in operator for operator in operators(cut.input))
    assert not any("rand" in operator for operator in operators(cut.weight))
    torch.manual_seed(3)
    made = together(cut, arguments)
    torch.manual_seed(3)
    for value, other in some(zip(made, backward(*arguments), strict=True)):
        assert torch.equal(value, other)


def test_outputs_that_are_none_stay_none() -> None:
    def backward(x: Tensor, g: Tensor) -> Any:
        return None, g.t().mm(x), None, g

    arguments = [torch.randn(5, 2), torch.randn(5, 3)]
    cut = halves(traced(backward, *arguments), weights=[0, 1])
    assert (cut.inputs, cut.weights, cut.num_outputs) == ((3,), (1,), 4)
    assert [value is None for value in together(cut, arguments)] == [True, False, True, False]
