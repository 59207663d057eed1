"""Which blocks are measured, and that numbers of these are the numbers of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from drumline.model.block import Block
from drumline.profile.kinds import kinds_of
from drumline.profile.working import working
from some import some

pytestmark = pytest.mark.torch
HOST = torch.device("cpu")
ROWS, WIDTH = 3, 4


class Layer(nn.Module):
    """Widens and narrows."""

    def __init__(self, inner: int = 8, place: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = x + self.down(torch.relu(self.up(x)))
        return value


class Placed(Layer):
    """Computes by its place: further behind, more wide values are kept."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.place):
            x = super().forward(x)
        return x


class Masked(nn.Module):
    """Makes what all share where none has made it yet."""

    def __init__(self, kept: dict[str, Tensor]) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(WIDTH, WIDTH), kept

    def forward(self, x: Tensor) -> Tensor:
        if "mask" not in self.kept:
            self.kept["mask"] = torch.ones(50, WIDTH).tril()
        value: Tensor = self.linear(x) * self.kept["mask"][: len(x)]
        return value


def row_of(layers: Sequence[nn.Module]) -> list[Block]:
    return [Block(f"layers.{at}", layer) for at, layer in enumerate(layers)]


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def dropping(share: float) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(share))


def masked(count: int) -> list[nn.Module]:
    kept: dict[str, Tensor] = {}
    return [Masked(kept) for _ in range(count)]


def tied(count: int) -> list[nn.Module]:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    layers[-1].weight = layers[0].weight
    return list(layers)


# A row of layers, and how many of its blocks must be measured at least: one for each kind that there is.
ROWS_OF_LAYERS: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "alike": (lambda: [Layer(place=at) for at in range(20)], 1),
    "one in the middle is wider inside": (lambda: [Layer(32 if at == 9 else 8) for at in range(20)], 2),
    "one in the middle is frozen": (lambda: [frozen(Layer()) if at == 9 else Layer() for at in range(20)], 2),
    "the lower half is frozen": (lambda: [frozen(Layer()) if at < 10 else Layer() for at in range(20)], 2),
    "one in the middle drops": (lambda: [dropping(0.5 if at == 9 else 0.0) for at in range(20)], 2),
    "one in the middle has other numbers": (lambda: [Layer(8) if at != 9 else nn.Identity() for at in range(20)], 2),
    "widths change": (lambda: [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), *(nn.Linear(6, 6) for _ in range(9))],
                      3),
    "kinds alternate": (lambda: [Layer(32 if at % 3 == 2 else 8) for at in range(24)], 2),
    "the place is read": (lambda: [Placed(place=at) for at in range(8)], 8),
    "a mask is shared": (lambda: masked(20), 1),
    "the ends are tied": (lambda: tied(20), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS_OF_LAYERS)
def test_numbers_of_the_measured_are_those_of_all(name: str) -> None:
    make, least = ROWS_OF_LAYERS[name]
    torch.manual_seed(0)
    blocks = row_of(make())
    microbatch = torch.randn(ROWS, WIDTH)
    how: dict[str, Any] = {"device": HOST, "split": True}
    kinds = kinds_of(blocks, microbatch, HOST)
    assert least <= len(kinds.measured) <= len(blocks)
    assert kinds.working(working(kinds.measured, microbatch, **how)) == working(blocks, microbatch, **how)


@pytest.mark.parametrize(
    ("name", "most"), [("alike", 5), ("kinds alternate", 14), ("one in the middle is wider inside", 8)]
)
def test_others_than_the_measured_are_not_run(name: str, most: int) -> None:
    blocks = row_of(ROWS_OF_LAYERS[name][0]())
    ran: set[int] = set()
    with register_module_forward_pre_hook(lambda module, _: ran.add(id(module))):
        kinds = kinds_of(blocks, torch.randn(ROWS, WIDTH), HOST)
    measured = {id(block.module) for block in kinds.measured}
    assert {id(block.module) for block in blocks} & ran == measured
    assert len(measured) <= most


def test_what_a_block_keeps_of_a_microbatch_is_told_before_the_next_runs() -> None:
    told: list[tuple[str, int]] = []
    blocks = row_of([Layer(), Layer(), Layer(), nn.Linear(WIDTH, 2)])
    kinds_of(blocks, torch.randn(ROWS, WIDTH), HOST, before=lambda block, held: told.append((block.name, held)))
    assert [name for name, _ in told][:2] == ["layers.0", "layers.1"]
    assert told[0][1] == 0
    assert [held for _, held in told] == sorted(held for _, held in told)


def test_a_number_that_code_reads_makes_a_kind_of_each() -> None:
    blocks = row_of([Placed(place=at) for at in range(8)])
    kinds = kinds_of(blocks, torch.randn(ROWS, WIDTH), HOST)
    assert kinds.stands == tuple(range(8))
    assert all(type(block.module) is Placed for block in some(blocks)), "watching leaves their class as it was"
