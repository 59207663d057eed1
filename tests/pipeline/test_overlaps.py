"""Parameters over one memory, and tensors of classes of their own at a cut: as in a plain loop, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from chain_tricks import Marked
from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, ModelError
from drumline.core.placement import Placement
from drumline.model.block import Block
from drumline.model.values import pack, unpack, with_kinds
from drumline.model.weights.overlaps import refuse_overlaps
from drumline.pipeline.pipeline import Pipeline
from matrices import matrix
from refused import misses, refused, saying
from some import some

pytestmark = pytest.mark.torch

WIDTH, MICROBATCHES, STEPS = 6, 4, 3
WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zb-h1": {},
    "zb-v": {},
    "gpipe": {"checkpoint": "full"},
    "dualpipe": {},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x).tanh()


class Biased(Layer):
    """Adds a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.shift


class Marks(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).as_subclass(Marked)


class Doubles(Layer):
    """Does something else to marked tensors."""

    def forward(self, x: Tensor) -> Any:
        twice = isinstance(x, Marked)
        x = super().forward(x.as_subclass(Tensor))
        return x * 2 if twice else x


def weights(model: Any) -> list[nn.Parameter]:
    return [block.linear.weight for block in model]


def layers() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(4)))


def tied_by_data() -> nn.Sequential:
    model = layers()
    weights(model)[3].data = weights(model)[0].data
    return model


def tied_transposed() -> nn.Sequential:
    model = layers()
    weights(model)[3].data = weights(model)[0].data.t()
    return model


def a_part() -> nn.Sequential:
    model = layers()
    last: Any = model[3]
    last.linear.bias = nn.Parameter(weights(model)[0].data[2])
    return model


def biased(block: Any) -> Any:
    return block.linear.bias.data


def buffer_over_a_bias() -> nn.Sequential:
    model = nn.Sequential(Layer(), Layer(), Layer(), Biased())
    model[3].shift = biased(model[0])
    return model


def frozen() -> nn.Sequential:
    model = tied_by_data()
    for number in (0, 3):
        weights(model)[number].requires_grad_(False)
    return model


def in_one_block() -> nn.Sequential:
    model = nn.Sequential(*(nn.Sequential(Layer(), Layer()) for _ in range(4)))
    pair: Any = model[1]
    pair[1].linear.weight.data = pair[0].linear.weight.data
    return model


def slices() -> nn.Sequential:
    """All weights in one memory, of which none has a part in common with another."""
    model = layers()
    flat = torch.cat([weight.data.flatten() for weight in weights(model)[:2]])
    columns = torch.cat([weight.data for weight in weights(model)[2:]], dim=1)
    for number, weight in enumerate(weights(model)):
        if number < 2:
            weight.data = flat[number * WIDTH**2 : (number + 1) * WIDTH**2].view(WIDTH, WIDTH)
        else:
            weight.data = columns[:, (number - 2) * WIDTH : (number - 1) * WIDTH]
    return model


def marked() -> nn.Sequential:
    return nn.Sequential(Layer(), Marks(), Doubles(), Layer())


def shared(name: str, other: str) -> dict[str, str]:
    return saying(f"'{name}' and '{other}' share memory but are two tensors", fix="tie them.*or clone one")


WEIGHTS = shared("0.linear.weight", "3.linear.weight")
REFUSED: dict[str, tuple[Callable[[], nn.Sequential], dict[str, str]]] = {
    "tied by data": (tied_by_data, WEIGHTS),
    "tied by data, transposed": (tied_transposed, WEIGHTS),
    "a part": (a_part, shared("0.linear.weight", "3.linear.bias")),
    "a buffer over a bias": (buffer_over_a_bias, shared("0.linear.bias", "3.shift")),
}
RIGHT: dict[str, Callable[[], nn.Sequential]] = {
    "frozen": frozen,
    "in one block": in_one_block,
    "slices": slices,
    "a class of its own": marked,
}
CASES: dict[str, Callable[[], nn.Sequential]] = {**{name: make for name, (make, _) in REFUSED.items()}, **RIGHT}


class Uses(Layer):
    """Adds a tensor that it has in an attribute."""

    def __init__(self, extra: Tensor) -> None:
        super().__init__()
        self.extra = {"row": extra}

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.extra["row"]


def row_in_an_attribute() -> nn.Sequential:
    model = layers()
    model[3] = Uses(weights(model)[0].data[1])
    return model


ROW = "a row in an attribute"
ALIAS = saying("the attribute 'extra' of block '3' has the memory of '0.linear.weight'", fix="clone|zb-v")


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def made(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return row_in_an_attribute() if name == ROW else CASES[name]()


def plain(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for step in range(STEPS):
        for x, y in zip(*(tensor.chunk(MICROBATCHES) for tensor in data(step)), strict=True):
            torch.autograd.backward(functional.mse_loss(model(x), y) / MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad()


def compare(name: str, way: str, **settings: Any) -> None:
    """Train by a plain loop and by a pipeline, and compare the weights that are here."""
    whole, model = made(name), made(name)
    plain(whole)
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": MICROBATCHES, "device": "cpu"}
    with Pipeline(model, schedule=way, **given, balance="even", **WAYS[way], **settings) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(STEPS):
            x, y = data(step)
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        pipe.settle()
        wanted = dict(whole.named_parameters())
        for key, param in some(list(pipe.named_parameters())):
            torch.testing.assert_close(param, wanted[key], rtol=1e-4, atol=1e-6, msg=f"{name}, {way}: {key}")


@matrix("name, way", CASES, WAYS, times=1)
def test_in_one_process_all_of_them_train(way: str, name: str) -> None:
    compare(name, way, num_ranks=2)


@pytest.mark.parametrize("way", WAYS)
def test_an_attribute_over_a_weight_trains_unless_its_block_is_copied(way: str) -> None:
    if way != "dualpipe":
        compare(ROW, way, num_ranks=2)
        return
    with refused(ModelError, ALIAS["error"], expected="updates do not reach the copy", fix="zb-v"):
        compare(ROW, way, num_ranks=2)


def on_ranks() -> dict[tuple[str, str], DrumlineError | None]:
    """Train everything; return what each case raised."""
    raised: dict[tuple[str, str], DrumlineError | None] = {}
    for name in (*CASES, ROW):
        for way in WAYS:
            raised[name, way] = None
            try:
                compare(name, way, transport="shared-memory")
            except DrumlineError as error:
                raised[name, way] = error
    return raised


def test_between_processes_they_train_or_are_refused() -> None:
    """Where each rank has a copy of every stage, one memory stays one."""
    for found in launch(on_ranks, num_ranks=2):
        for (name, way), error in some(found.items()):
            # In zb-v, rank 0 has both ends of the model, and rank 1 all of its middle.
            if name == ROW and way not in ("zb-v", "dualpipe"):
                assert isinstance(error, ModelError), (name, way, error)
                assert not misses(error, ALIAS), (name, way, error)
            elif name in RIGHT or way in ("zb-v", "dualpipe"):
                assert error is None, (name, way, error)
            else:
                assert isinstance(error, ModelError), (name, way, error)
                assert not misses(error, REFUSED[name][1]), (name, way, error)


class Noted(Tensor):
    """A tensor of a class that can hold more."""


def test_classes_travel_if_they_can_be_made_again() -> None:
    class Local(Tensor):
        pass

    noted = torch.ones(2).as_subclass(Noted)
    noted.note = "more"  # type: ignore[attr-defined]
    tensors = (torch.ones(2).as_subclass(Marked), torch.zeros(2))
    _, form = pack({"x": tensors[0], "y": tensors[1]})
    value = unpack([tensor.as_subclass(Tensor) for tensor in tensors], with_kinds(tensors, form))
    assert (type(value["x"]), type(value["y"])) == (Marked, Tensor)
    for tensor in (noted, torch.ones(2).as_subclass(Local), nn.Parameter(torch.ones(2)), torch.ones(2)):
        assert with_kinds((tensor,), None) is None


def test_what_lies_between_each_other_is_told_apart() -> None:
    def outcome(first: Tensor, other: Tensor) -> bool:
        blocks = [nn.Module(), nn.Module()]
        for block, tensor in zip(blocks, (first, other), strict=True):
            block.tensor = nn.Parameter(tensor)
        try:
            refuse_overlaps(
                [[Block("0", blocks[0])], [Block("1", blocks[1])]], Placement.linear(2), torch.device("cpu")
            )
        except ModelError:
            return True
        return False

    flat = torch.zeros(24)
    square = flat.view(4, 6)
    assert not outcome(flat[:12], flat[12:])
    assert outcome(flat[:13], flat[12:])
    assert not outcome(square[:, :3], square[:, 3:])
    assert outcome(square[:, :4], square[:, 3:])
    assert not outcome(flat[::2], flat[1::2])
    assert outcome(flat[::2], flat[::3])
    assert outcome(square, square.t())
    assert not outcome(flat, torch.zeros(24))
    assert outcome(torch.zeros(3, dtype=torch.float64).view(3), torch.zeros(3)) is False
