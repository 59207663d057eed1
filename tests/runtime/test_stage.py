"""A stage by itself: what it keeps between F and its backward, and that all ways through it compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.core.rules import Backward
from drumline.model.block import Block, blocks_of
from drumline.model.randomness import Randomness
from drumline.runtime.stage import Partly, Stage
from refused import refused
from some import some

pytestmark = pytest.mark.torch


def stage_of(*modules: nn.Module, index: int = 1, **settings: Any) -> Stage:
    return Stage(index, blocks_of(list(modules)), Randomness(0, torch.device("cpu")), **settings)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]


def expected(modules: list[nn.Module], value: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaf = value.clone().requires_grad_()
    parameters = [param for module in modules for param in module.parameters()]
    made = nn.Sequential(*modules)(leaf)
    first, *rest = torch.autograd.grad(made, [leaf, *parameters], gradient)
    return first, rest


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "split": {"split": [0]},
    "recomputed": {"checkpointed": ["0", "1", "2"]},
    "recomputed in part": {"checkpointed": ["1"]},
    "recomputed and split": {"checkpointed": ["0", "1"], "split": [0]},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_through_a_stage_gives_the_same_gradients(way: str) -> None:
    modules, value, gradient = layers(), torch.randn(5, 3), torch.randn(5, 2)
    back, weights = expected(modules, value, gradient)
    stage = stage_of(*modules, **WAYS[way])
    stage.begin()
    made = stage.forward(0, value)
    assert not made.requires_grad
    if "split" in WAYS[way]:
        (found,) = stage.backward_input(0, (gradient,))
        assert all(some(param.grad is None for param in stage.parameters))
        stage.backward_weight(0)
    else:
        (found,) = stage.backward(0, (gradient,))
    torch.testing.assert_close(found, back)
    for param, other in zip(stage.parameters, weights, strict=True):
        torch.testing.assert_close(param.grad, other)
    assert not stage.passes


@pytest.mark.parametrize("way", ["whole", "split", "recomputed"])
def test_blocks_that_change_their_input_in_place_get_a_copy(way: str) -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    layer, value = nn.Linear(3, 3), torch.randn(5, 3)
    stage = stage_of(Doubles(), layer, **WAYS[way])
    for _ in range(2):
        before = value.clone()
        made = stage.forward(0, value)
        torch.testing.assert_close(made, layer(before * 2).detach())
        assert torch.equal(value, before)
        if way == "split":
            (found,) = stage.backward_input(0, (torch.ones(5, 3),))
            stage.backward_weight(0)
        else:
            (found,) = stage.backward(0, (torch.ones(5, 3),))
        torch.testing.assert_close(found, 2 * torch.ones(5, 3) @ layer.weight.detach())


def test_without_a_backward_to_come_nothing_is_kept() -> None:
    stage = stage_of(*layers(), loss=nn.functional.mse_loss)
    value, target = torch.randn(5, 3), torch.randn(5, 2)
    made, loss = stage.forward(0, value, target, keep=False)
    assert not stage.passes
    torch.testing.assert_close(loss, nn.functional.mse_loss(made, target))
    assert stage.forward(0, value, None, keep=False)[1] is None


def test_a_tensor_without_a_gradient_is_said_to_have_none() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * 2, torch.ones(3), torch.arange(3)

    first, second = stage_of(Pairs(), index=1), stage_of(nn.Identity(), index=2)
    made = first.forward(0, torch.randn(3))
    assert isinstance(made, Partly)
    assert made.plain == (1,)
    second.forward(0, made)
    assert [leaf.requires_grad for leaf in second.passes[0][0].leaves] == [True, False, False]


def test_a_stage_that_nobody_trains_keeps_nothing_and_refuses_hidden_parameters() -> None:
    class Hides(nn.Module):
        scale: Any = torch.ones(3, requires_grad=True)

        def forward(self, x: Tensor) -> Any:
            return x * self.scale

    blocks = [Block("0", nn.Linear(3, 3).requires_grad_(False))]
    frozen = Stage(0, blocks, Randomness(0, torch.device("cpu")), kind=Backward.NONE)
    frozen.forward(0, torch.randn(2, 3))
    assert not frozen.passes
    hiding = Stage(0, [Block("0", Hides())], Randomness(0, torch.device("cpu")), kind=Backward.NONE)
    with refused(ModelError, "nothing up to stage 0 has trainable parameters"):
        hiding.forward(0, torch.randn(2, 3))


@pytest.mark.parametrize("at", [0, 2])
def test_parameters_that_change_between_steps_are_followed_in_every_segment(at: int) -> None:
    modules = layers()
    stage = stage_of(*modules, checkpointed=["2"])
    assert len(stage.segments) == 2
    changed: Any = modules[at]
    assert not stage.renew()
    changed.weight.requires_grad_(False)
    assert stage.renew()
    assert len(stage.parameters) == 3
    assert not stage.renew()
    changed.weight = nn.Parameter(changed.weight.detach().clone())
    assert stage.renew()
    assert any(param is changed.weight for param in stage.parameters)
    assert not stage.renew()
