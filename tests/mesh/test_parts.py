"""Parts of tensor and expert parallelism, in one process: what counts as experts, which layers belong together."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from drumline.core.errors import ModelError
from drumline.features.mesh.experts.parallel import is_experts
from drumline.features.mesh.tensor.divide import DividedModule
from drumline.features.mesh.tensor.exchanges import LayerExchanges
from drumline.features.mesh.tensor.pairs import refuse_unpaired
from drumline.model.layers.moe import Experts
from drumline.model.layers.routing import SortedPairs
from drumline.model.layers.styles import Colwise, Rowwise
from refused import refused

pytestmark = [pytest.mark.torch, pytest.mark.features("mesh")]


class Stacked(nn.Module):
    """Experts of a stranger: parameters of these shapes."""

    def __init__(self, *shapes: tuple[int, ...], num_experts: Any = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        for at, shape in enumerate(shapes):
            self.register_parameter(f"weight{at}", nn.Parameter(torch.zeros(shape)))
        self.register_parameter("bias", None)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


class OtherNames(Stacked):
    """Takes what has other names."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return tokens


def with_child() -> nn.Module:
    made = Stacked((4, 8, 8))
    made.router = nn.Linear(8, 4)
    return made


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Stacked((4, 8, 8)), True),
        (Stacked((4, 8, 8), (4, 8)), True),  # stacked biases have two dimensions
        (Stacked((4, 8, 8), (4,)), False),  # one number for each expert is no weight of its own
        (Stacked((4, 8, 8), (8, 4)), False),  # one of them is not stacked
        (Stacked((8, 4, 4)), False),
        (Stacked(), False),
        (Stacked((4, 8, 8), num_experts="4"), False),
        (Stacked((4, 8, 8), num_experts=None), False),
        (OtherNames((4, 8, 8)), False),
        (with_child(), False),
        (Experts(8, 16, 4), True),
        (nn.Linear(4, 4), False),
    ],
)
def test_experts_are_stacked_weights_alone(module: nn.Module, expected: bool) -> None:
    assert is_experts(module) is expected


@pytest.mark.parametrize(("tokens", "choices", "num_experts"), [(6, 2, 4), (3, 1, 4), (5, 2, 3)])
def test_traced_pairs_have_counts_that_can_be_split(tokens: int, choices: int, num_experts: int) -> None:
    found = SortedPairs.of(torch.zeros((tokens, choices), dtype=torch.long, device="meta"), num_experts)
    assert len(found.counts) == num_experts
    assert sum(found.counts) == tokens * choices == found.order.numel()
    assert min(found.counts) >= 0
    assert max(found.counts) - tokens * choices / num_experts < num_experts, "about as many for each"


def divided(name: str, style: Any) -> DividedModule:
    return DividedModule(name, nn.Linear(2, 2), style, nn.Module())


def test_a_pair_is_found_in_the_innermost_module_around_both() -> None:
    """What two layers of one module make of each other is not there for a third of another module, in any order."""
    pairs = [
        divided(f"{module}.{name}", style)
        for module in map(str, range(40))
        for name, style in (("in.up", Colwise()), ("out.down", Rowwise()))
    ]
    refuse_unpaired(pairs)
    for order in (1, -1):
        with refused(ModelError, r"divides body\.in\.up by columns, and no layer by rows"):
            refuse_unpaired([*pairs, divided("body.in.up", Colwise())][::order])


def test_layers_of_different_modules_go_together_where_neither_has_a_nearer_one() -> None:
    refuse_unpaired([divided("a.up", Colwise()), divided("b.down", Rowwise())])
    with refused(ModelError, r"divides b\.down by rows, and no layer by columns"):
        refuse_unpaired([divided("b.down", Rowwise()), divided("b.split", Rowwise(split=True))])


@pytest.mark.parametrize(("is_on", "is_fake"), [(True, False), (False, False), (True, True), (False, True)])
def test_latent_outputs_are_copied_to_lines_where_they_hold_values(is_on: bool, is_fake: bool) -> None:
    exchanges: Any = SimpleNamespace(is_on=is_on, copied=lambda rotary: rotary * 10)
    with FakeTensorMode() if is_fake else nullcontext():
        found = LayerExchanges.after_latent(exchanges, 2, nn.Module(), (), torch.ones(1, 5))
    if is_on and not is_fake:
        assert found.tolist() == [[1, 1, 1, 10, 10]]
    else:
        assert found is None
