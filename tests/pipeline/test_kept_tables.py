"""Tables that blocks of a traced model make for each other are no ties between them; what only looks like one is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import ModelError
from refused import refused
from some import some
from state_pipes import piped

pytestmark = pytest.mark.torch
WIDTH, ROWS, NUM_MICROBATCHES = 4, 8, 4
TABLES: dict[Any, Any] = {}


@functools.lru_cache(maxsize=1)
def slopes(length: int) -> Tensor:
    return torch.linspace(0.5, 1.5, length)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def factor(self, x: Tensor) -> Any:
        return slopes(x.shape[-1])

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.layer(x)) * self.factor(x.detach()) + x


class Makes(Layer):
    """Makes the table for others."""

    def factor(self, x: Tensor) -> Any:
        TABLES["slopes"] = torch.linspace(0.5, 1.5, WIDTH)
        return TABLES["slopes"]


class Finds(Layer):
    def factor(self, x: Tensor) -> Any:
        return TABLES["slopes"]


class Differs(Layer):
    """Would make another table than the one it finds."""

    def factor(self, x: Tensor) -> Any:
        return TABLES.setdefault("slopes", torch.linspace(0.5, 2.5, WIDTH))


class Means(Layer):
    """Makes something of its input, by a table."""

    def factor(self, x: Tensor) -> Any:
        if "mean" not in TABLES:
            mean = torch.zeros(WIDTH)
            mean.add_(x.mean(0))
            TABLES["mean"] = mean * 2
        return TABLES["mean"]


class Reads(Layer):
    """Makes a table of a number that it reads from its input."""

    def factor(self, x: Tensor) -> Any:
        largest = float(x.max())
        return TABLES.setdefault("largest", torch.full((WIDTH,), largest))


class Trains(Layer):
    """Makes it of a weight."""

    def factor(self, x: Tensor) -> Any:
        return TABLES.setdefault("weight", self.layer.weight.detach()[0] * 2)


class Shrinks(Layer):
    """Changes the table of all blocks."""

    def factor(self, x: Tensor) -> Any:
        return TABLES.setdefault("slopes", torch.linspace(0.5, 1.5, WIDTH)).mul_(0.9).clone()


class Draws(Layer):
    def factor(self, x: Tensor) -> Any:
        return TABLES.setdefault("drawn", torch.rand(WIDTH))


def note() -> None:
    """Keep something in an attribute."""


class Follows(Layer):
    """Has what the block before made of its input in a function's attribute."""

    def factor(self, x: Tensor) -> Any:
        factor = 1 + getattr(note, "last", 0)
        vars(note)["last"] = x.mean()
        return factor


class FollowsInADict(Layer):
    """Has it in a dict of its own, which is another's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.box = TABLES

    def factor(self, x: Tensor) -> Any:
        factor = 1 + self.box.get("last", 0)
        self.box["last"] = x.mean()
        return factor


class Traced(nn.Module):
    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def nothing_is_kept() -> None:
    TABLES.clear()
    slopes.cache_clear()
    vars(note).clear()


def batch() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, WIDTH, generator=chance)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    for x, y in zip(*(each.chunk(NUM_MICROBATCHES) for each in batch()), strict=True):
        torch.autograd.backward(functional.mse_loss(model(x), y) / NUM_MICROBATCHES)
    return {name: param.grad for name, param in some(model.named_parameters())}


def pipeline(model: nn.Module, num_ranks: int = 2) -> dl.Pipeline:
    return piped(model, num_ranks=num_ranks, example=batch()[0])


def stepped(model: nn.Module, num_ranks: int = 2) -> dict[str, Tensor | None]:
    x, y = batch()
    with pipeline(model, num_ranks) as pipe:
        pipe.step(x, target=y)
        return {name: param.grad for name, param in pipe.named_parameters()}


def test_a_function_with_a_memory_leaves_every_cut_possible_and_keeps_no_stand_in() -> None:
    mine = slopes(WIDTH + 1)  # by which the trace's own is replaced
    wanted = gradients(Traced(*4 * [Layer]))
    slopes.cache_clear()
    mine = slopes(WIDTH + 1)
    found = stepped(Traced(*4 * [Layer]), num_ranks=4)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert type(slopes(WIDTH)) is Tensor
    assert type(slopes(WIDTH + 1)) is type(mine) is Tensor


def test_a_table_that_another_block_makes_ties_the_two_to_one_stage() -> None:
    kinds = [Makes, Finds, Layer, Layer]
    wanted = gradients(Traced(*kinds))
    TABLES.clear()
    torch.testing.assert_close(stepped(Traced(*kinds)), wanted, rtol=1e-5, atol=1e-6)
    with refused(ModelError, r"'layers.1' reads a tensor that 'layers.0' created .*the variable 'TABLES' keeps it"):
        pipeline(Traced(*kinds), num_ranks=4)


@pytest.mark.parametrize("kind", [Means, Reads, Trains, Shrinks, Draws])
def test_what_depends_on_data_or_on_what_others_did_is_no_table(kind: type[Layer]) -> None:
    with refused(ModelError, "'layers.1' reads a tensor that 'layers.0' created"):
        pipeline(Traced(kind, kind, Layer, Layer), num_ranks=4)


@pytest.mark.parametrize(
    ("kind", "what"), [(Follows, "attribute 'last' of function 'note'"), (FollowsInADict, "attribute 'layers.0.box'")]
)
def test_a_tie_says_where_the_tensor_is(kind: type[Layer], what: str) -> None:
    with refused(ModelError, rf"'layers.0' created but did not return \(the {what} keeps it\)"):
        pipeline(Traced(kind, kind, Layer, Layer), num_ranks=4)


def test_a_block_that_would_make_another_table_than_it_finds_is_tied_to_who_made_it() -> None:
    with refused(ModelError, "'layers.1' reads a tensor that 'layers.0' created"):
        pipeline(Traced(Makes, Differs, Layer, Layer), num_ranks=4)
