"""Models of every shape as chains of pieces: the same numbers, or a refusal that says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.blocks.cut import cut
from drumline.model.blocks.pieces import pieces_of
from drumline.model.blocks.script import Live
from drumline.model.follow.inputs import Inputs
from refused import refused, saying
from some import some

pytestmark = pytest.mark.torch

WIDTH = 6


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def x(rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def run(block: Block, value: Any) -> Any:
    """Run a piece and return what would travel from it."""
    piece: Any = block.module
    return piece.seal(piece(value))


def through(blocks: list[Block], *args: Any, **kwargs: Any) -> Any:
    """Run the pieces as if each were a stage of its own, on another rank."""
    value: Any = Inputs(args, kwargs)
    for block in blocks:
        value = run(block, value)
    return value


def names(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks]


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.autograd.backward(output.square().sum())
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


class UNet(nn.Module):
    """Values that skip all blocks in between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = layers(3)
        self.up = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(3)])
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], -1)).relu()
        return self.out(x)


def test_skips_ride_along_and_no_longer_than_they_are_needed() -> None:
    model = UNet()
    blocks = pieces_of(model, Inputs((x(),), {}))
    assert names(blocks) == ["down.0", "down.1", "down.2", "up.0", "up.1", "up.2", "out"]
    value: Any = Inputs((x(),), {})
    alive = []
    for block in blocks[:-1]:
        value = run(block, value)
        assert isinstance(value, Live)
        alive.append(len(value.tensors))
    assert alive == [1, 2, 3, 2, 1, 1], "what follows a block belongs to it: the concatenation too"
    made = through(blocks, x())
    assert torch.equal(made, model(x()))
    assert all(torch.equal(part, gradients(model, model(x()))[name]) for name, part in gradients(model, made).items())


class Everything(nn.Module):
    """Keywords, None, strings, nests, whole numbers and truth values, all the way through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)

    def forward(self, batch: dict[str, Any], *, kind: str = "plain", scale: Any = None, keep: Any = None) -> Any:
        value = batch["x"]
        for layer in self.layers:
            value = layer(value)
            value = torch.where(batch["keep"][0].unsqueeze(-1), value, value * 2)
            if kind == "scaled" and scale is not None:
                value = value * scale
        return {"value": value, "kind": kind, "index": batch["index"] + 1, "none": keep, "nest": [(value.sum(), "a")]}


@pytest.mark.parametrize("kwargs", [{}, {"kind": "scaled", "scale": 3.0}, {"scale": None}])
def test_any_nesting_of_values_passes(kwargs: dict[str, Any]) -> None:
    batch = {"x": x(), "keep": (torch.tensor([True, False, True, True]),), "index": torch.arange(4), "name": "n"}
    model = Everything()
    blocks = pieces_of(model, Inputs((batch,), kwargs))
    made, wanted = through(blocks, batch, **kwargs), model(batch, **kwargs)
    assert made.keys() == wanted.keys()
    assert torch.equal(made["value"], wanted["value"])
    assert torch.equal(made["index"], wanted["index"])
    assert not made["index"].requires_grad
    assert (made["kind"], made["none"], made["nest"][0][1]) == (wanted["kind"], wanted["none"], "a")


class Glue(nn.Module):
    """Parameters, buffers and constants used between blocks; changes in place, views, parts without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))
        self.fixed = torch.full((WIDTH,), 2.0)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) * self.scale + self.shift
            x += self.fixed
            with torch.no_grad():
                largest = x.abs().max()
            x = x / largest
        flat = x.view(-1)
        flat[0] = 0.0
        return flat.view_as(x)[:, 1:]


def test_what_stands_between_blocks_is_done_there() -> None:
    model = Glue()
    blocks = pieces_of(model, Inputs((x(),), {}))
    made, wanted = through(blocks, x()), model(x())
    assert torch.equal(made, wanted)
    mine, theirs = gradients(model, through(blocks, x())), gradients(model, model(x()))
    assert mine.keys() == theirs.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert {name for block in blocks for name, _ in block.named_parameters()} == set(theirs)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = Straight.apply(layer(x))  # type: ignore[no-untyped-call]
        return x


def test_functions_with_a_backward_of_their_own_keep_it() -> None:
    torch.manual_seed(0)  # some weights round everything away
    model = Rounded()
    blocks = pieces_of(model, Inputs((x(),), {}))
    mine, theirs = gradients(model, through(blocks, x())), gradients(model, model(x()))
    assert all(some(torch.equal(mine[name], theirs[name]) and bool(mine[name].any()) for name in theirs))


class Repeats(nn.Module):
    """The same block again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.layer(x).tanh()
        return self.out(x)


def test_a_block_used_again_is_the_same_block_again() -> None:
    model = Repeats()
    blocks = pieces_of(model, Inputs((x(),), {}))
    assert names(blocks) == ["layer", "layer#2", "layer#3", "out"]
    assert len({id(param) for block in blocks for param in block.module.parameters()}) == 4
    assert torch.equal(through(blocks, x()), model(x()))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.last = self.inner(x)
        return self.last * 2


class Recalls(nn.Module):
    def __init__(self, other: Remembers) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.other: Any
        self.__dict__["other"] = other  # no child, or it would be a block of its own

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) + self.other.last


class Secret(nn.Module):
    """A block that reads what another one left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        remembers = Remembers()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), remembers, nn.Linear(WIDTH, WIDTH), Recalls(remembers)])
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def test_no_cut_separates_a_block_from_what_it_reads_behind_the_models_back() -> None:
    model = Secret()
    blocks = pieces_of(model, Inputs((x(),), {}))
    assert names(blocks) == ["layers.0", "layers.1", "out"]
    assert torch.equal(through(blocks, x()), model(x()))
    words = (
        r"'layers.3' reads a tensor that 'layers.1' created but did not return \(the model keeps it as layers.1.last\)"
    )
    with refused(ModelError, f"the model cannot be cut before 'layers.3': {words}", fix="the nearest cut that works"):
        cut(blocks, 2, cuts=["layers.3"])
    words = (
        f"the model has 3 blocks for 4 stages: no cut is possible before layers.2 .and 1 module more., because {words}"
    )
    with refused(ModelError, words):
        cut(blocks, 4)


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        if x.sum() > 0:
            x = -x
        return self.layers[1](x)


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keeps(), Keeps()])

    def forward(self, x: Tensor) -> Any:
        kept = Kept()
        for layer in self.layers:
            x = layer(x, kept)
        return x


class Kept:
    def __init__(self) -> None:
        self.values: list[Tensor] = []


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: Kept) -> Any:
        kept.values.append(x)
        return self.inner(x)


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor) -> Any:
        return self.layers[1](self.layers[0](x) + torch.ones(5))


class Between(nn.Module):
    """Does something between its blocks."""

    mean: Tensor

    def __init__(self, what: str, chance: float = 0.5) -> None:
        super().__init__()
        self.layers, self.what, self.chance = layers(3), what, chance
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if self.what == "drops layers" and torch.rand([]) < self.chance:
                continue
            x = layer(x) * self.scale
        if self.what == "exchanges a buffer":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        if self.what == "has a hook":
            x.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            Between("drops layers"),
            saying("branches on a random number between its blocks.*`if self.what == .drops layers"),
        ),
        (Between("exchanges a buffer"), saying("replaces the buffer 'mean' by another tensor", fix="self.mean.copy_")),
        (Between("has a hook"), saying("registers a hook on a tensor between its blocks, in `x.register_hook")),
        (
            Decides(),
            saying(
                r"branches on the values of a tensor between its blocks.*`if x.sum\(\) > 0:`",
                fix="move it into a block",
            ),
        ),
        (Cache(), saying("'layers.0' gets or returns a Kept", expected="tensors, plain values")),
        (Alone(), saying("the model calls none of its modules")),
        (Breaks(), saying("forward failed between its blocks while Drumline traced it: RuntimeError")),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(model: nn.Module, words: dict[str, str]) -> None:
    with refused(ModelError, **words):
        pieces_of(model, Inputs((x(),), {}))


def test_a_chance_of_nothing_is_no_decision() -> None:
    model = Between("drops layers", chance=0.0)
    blocks = pieces_of(model, Inputs((x(),), {}))
    assert torch.equal(through(blocks, x()), model(x()))


def test_states_hold_what_the_models_own_does() -> None:
    model = Between("")
    blocks = pieces_of(model, Inputs((x(),), {}))
    assert {name for block in blocks for name in block.module.state_dict()} == set(model.state_dict())


def test_a_block_that_fails_is_named_with_the_models_own_line() -> None:
    with refused(ModelError, r"failed in 'layers.0' while Drumline traced it: .*`x = layer\(x\)"):
        pieces_of(Between(""), Inputs((torch.ones(2, WIDTH + 1),), {}))


@pytest.mark.parametrize("given", [{1, 2}, bytearray(2)])
def test_arguments_that_can_change_are_refused(given: Any) -> None:
    model = Skipping()
    blocks = pieces_of(model, Inputs((x(),), {}))
    with refused(ModelError, r"the model gets or returns a (set|bytearray)"):
        through(blocks, x(), given)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor, more: Any = None) -> Any:
        return self.layers[1](self.layers[0](x))


class Masked(nn.Module):
    """Makes a large mask out of a small input, and positions out of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attends() for _ in range(4)])

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        positions = torch.arange(x.shape[1], device=x.device)
        mask = (positions[None, :, None] >= positions[None, None, :]) & (
            positions[None, None, :] < lengths[:, None, None]
        )
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return x + functional.scaled_dot_product_attention(self.inner(x), x, x, attn_mask=mask)


def test_a_mask_made_of_small_inputs_is_made_again_and_does_not_travel() -> None:
    model = Masked()
    value, lengths = torch.randn(2, 64, WIDTH), torch.tensor([64, 40])
    blocks = pieces_of(model, Inputs((value, lengths), {}))
    sent = run(blocks[0], Inputs((value, lengths), {}))
    assert sorted(tuple(tensor.shape) for tensor in sent.tensors) == [(2,), (2, 64, WIDTH)]
    assert torch.equal(through(blocks, value, lengths), model(value, lengths))
    mine = gradients(model, through(blocks, value, lengths))
    theirs = gradients(model, model(value, lengths))
    assert all(some(torch.equal(mine[name], theirs[name]) for name in theirs))


def test_other_shapes_and_values_are_followed_anew() -> None:
    model = Masked()
    blocks = pieces_of(model, Inputs((torch.randn(2, 8, WIDTH), torch.tensor([8, 4])), {}))
    for rows, length in ((2, 8), (3, 8), (1, 20), (2, 8)):
        value, lengths = torch.randn(rows, length, WIDTH), torch.full((rows,), length - 1)
        assert torch.equal(through(blocks, value, lengths), model(value, lengths))


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor, depth: int = 4) -> Any:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x


def test_inputs_for_which_other_blocks_run_are_refused() -> None:
    blocks = pieces_of(Grows(), Inputs((x(),), {}))
    with refused(ModelError, r"for this input the model does not call 'layers.2'"):
        through(blocks, x(), depth=2)


def test_what_no_input_reaches_is_kept_all_the_same() -> None:
    model = Grows()
    blocks = pieces_of(model, Inputs((x(),), {"depth": 2}))
    assert names(blocks) == ["layers.0", "layers.1"]
    held = {name for block in blocks for name, _ in block.named_parameters()}
    assert held == {name for name, _ in model.named_parameters()}


def test_a_cut_inside_of_a_block_opens_it() -> None:
    model = nn.ModuleDict(
        {"body": nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, 2))}
    )

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Any:
            return self.parts["body"](x)

    assert names(pieces_of(Wraps(), Inputs((x(),), {}))) == ["parts.body"]
    deeper = pieces_of(Wraps(), Inputs((x(),), {}), cuts=["parts.body.0.1"])
    assert names(deeper) == ["parts.body.0.0", "parts.body.0.1", "parts.body.1"]


def test_the_mode_of_the_model_counts() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(3)

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = functional.dropout(layer(x), 0.5, self.training)
            return x

    model = Drops()
    blocks = pieces_of(model, Inputs((x(),), {}))
    torch.manual_seed(3)
    made = through(blocks, x())
    torch.manual_seed(3)
    assert torch.equal(made, model(x()))
    for block in blocks:
        block.module.eval()
    assert torch.equal(through(blocks, x()), model.eval()(x()))


def test_a_copy_of_a_piece_computes_with_its_own_parameters() -> None:
    model = Glue()
    blocks = pieces_of(model, Inputs((x(),), {}))
    copies = [Block(block.name, copy.deepcopy(block.module), "") for block in blocks]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not bool((through(blocks, x()) == through(copies, x())).all())


def test_the_model_itself_is_left_as_it_was() -> None:
    model = Glue()
    before = {name: (id(entry), entry.detach().clone()) for name, entry in model.state_dict(keep_vars=True).items()}
    call = nn.Module.__call__
    pieces_of(model, Inputs((x(),), {}))
    after = {name: (id(entry), entry.detach().clone()) for name, entry in model.state_dict(keep_vars=True).items()}
    assert {name: number for name, (number, _) in before.items()} == {name: index for name, (index, _) in after.items()}
    assert all(torch.equal(before[name][1], after[name][1]) for name in before)
    assert nn.Module.__call__ is call


@dataclass
class Point:
    x: Tensor
    label: str


class Dataclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OnPoints(), OnPoints()])

    def forward(self, point: Point) -> Point:
        for layer in self.layers:
            point = layer(point)
        return point


class OnPoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, point: Point) -> Point:
        return Point(self.inner(point.x), point.label + "!")


def test_blocks_may_pass_dataclasses() -> None:
    model = Dataclasses()
    blocks = pieces_of(model, Inputs((Point(x(), "a"),), {}))
    made, wanted = through(blocks, Point(x(), "a")), model(Point(x(), "a"))
    assert torch.equal(made.x, wanted.x)
    assert made.label == wanted.label == "a!!"


class Experts(nn.Module):
    """What a block does may depend on numbers; what it returns may not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Routes() for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) + 1.0
        return x


class Routes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = layers(2)

    def forward(self, x: Tensor) -> Any:
        made = torch.zeros_like(x)
        chosen = (x.sum(-1) > 0).long()
        for expert in sorted(set(chosen.tolist())):
            rows = (chosen == expert).nonzero().flatten()
            made = made.index_add(0, rows, self.experts[expert](x[rows]))
        return made


def test_blocks_may_decide_by_numbers() -> None:
    model = Experts()
    blocks = pieces_of(model, Inputs((x(16),), {}))
    assert torch.equal(through(blocks, x(16)), model(x(16)))


def test_followed_models_hold_no_memory() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(100_000, 100_000) for _ in range(3)])})

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Any:
            for layer in self.parts["layers"].children():
                x = layer(x)
            return x

    blocks = pieces_of(Large(), Inputs((torch.empty(2, 100_000),), {}), device=torch.device("cpu"))
    assert len(blocks) == 3
    assert all(param.is_meta for block in blocks for param in block.module.parameters())


ORDER: list[Callable[[], nn.Module]] = [UNet, Rounded, Repeats, Glue, Grows]


@pytest.mark.parametrize("kind", ORDER)
def test_exact_cover(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    blocks = pieces_of(model, Inputs((x(),), {}))
    owners: dict[int, list[str]] = {}
    for block in blocks:
        for param in block.module.parameters():
            owners.setdefault(id(param), []).append(block.name)
    assert owners.keys() == {id(param) for param in model.parameters()}
    shared = {tuple(where) for where in owners.values() if len(where) > 1}
    assert shared <= {("layer", "layer#2", "layer#3"), ("layers.0", "layers.1", "layers.2")}
