"""Attributes, variables and lists that change: between blocks, between steps, inside of blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from refused import saying
from zoo.branches import _two
from zoo.entry import WIDTH, ZOO, Entry, Stack, linear, refused, right


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = linear(), 1.0

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.scale


@refused("an attribute of blocks set between blocks", "'scale' of 'blocks.0'", fix="pass it to the block")
class SetsScale(Stack):
    def __init__(self) -> None:
        super().__init__(Scaled)

    def forward(self, x: Tensor) -> Any:
        for at, block in enumerate(self.blocks):
            block.scale = 0.5 + at
            x = block(x)
        return x


class Anneals(Stack):
    def __init__(self) -> None:
        super().__init__(Scaled)
        self.factor, self.settings = 1.0, {"shift": 0.5}
        self.config = SimpleNamespace(power=1)
        self.fixed = torch.ones(WIDTH)

    def between(self, x: Tensor, at: int) -> Any:
        return x**self.config.power * self.factor * self.blocks[0].scale + self.settings["shift"] * self.fixed


def annealing(change: Callable[[Any, int], Any]) -> Entry:
    return Entry(Anneals, change=change)


ZOO["an annealed attribute"] = annealing(lambda model, step: setattr(model, "factor", 1.0 - 0.25 * step))
ZOO["an annealed attribute of a block"] = annealing(lambda model, step: setattr(model.blocks[0], "scale", 1.0 + step))
ZOO["an annealed entry of a dict"] = annealing(lambda model, step: model.settings.update(shift=0.1 * step))
ZOO["an annealed field of an object"] = annealing(lambda model, step: setattr(model.config, "power", 1 + step % 2))
ZOO["a tensor changed in place"] = annealing(lambda model, step: model.fixed.add_(step))
ZOO["a tensor exchanged"] = annealing(lambda model, step: setattr(model, "fixed", torch.full((WIDTH,), 1.0 + step)))
ZOO["a number that becomes another kind of number"] = annealing(
    lambda model, step: setattr(model, "factor", (True, 1, 1.0)[step])
)

SETTINGS = {"scale": 1.0}
FACTOR = 1.0


class Globals(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return _scaled(x) * FACTOR


def _scaled(x: Tensor) -> Tensor:
    return x * SETTINGS["scale"]


def _sets_global(model: Any, step: int) -> None:
    global FACTOR
    FACTOR = 1.0 + step


ZOO["an annealed entry of a global dict"] = Entry(Globals, change=lambda model, step: SETTINGS.update(scale=1.0 + step))
ZOO["an annealed global"] = Entry(Globals, change=_sets_global)


def _closed_over() -> nn.Module:
    scale = [1.0]

    class Closed(Stack):
        def between(self, x: Tensor, at: int) -> Any:
            return x * scale[0]

    model = Closed()
    model.__dict__["anneal"] = lambda step: scale.__setitem__(0, 1.0 + step)
    return model


ZOO["an annealed variable of a closure"] = Entry(_closed_over, change=lambda model, step: model.anneal(step))


class ClassLevel(Stack):
    factor = 1.0

    def between(self, x: Tensor, at: int) -> Any:
        return x * self.factor


ZOO["an annealed attribute of the class"] = Entry(
    ClassLevel, change=lambda model, step: setattr(ClassLevel, "factor", 1.0 + step)
)


class Buffered(Stack):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def between(self, x: Tensor, at: int) -> Any:
        return x * self.scale


def _exchanges_buffer(model: Any, step: int) -> None:
    if step == 1:
        model.scale = torch.full((WIDTH,), 3.0)


ZOO["an exchanged buffer"] = Entry(Buffered, change=_exchanges_buffer)
ZOO["a buffer changed in place between steps"] = Entry(
    Buffered, change=lambda model, step: (model.scale.mul_(2.0), None)[1]
)


def _exchanges_block(model: Any, step: int) -> None:
    if step == 1:
        torch.manual_seed(5)
        model.blocks[2] = linear()


def _exchanges_inside(model: Any, step: int) -> None:
    if step == 1:
        torch.manual_seed(5)
        model.blocks[2].layer = linear()


ZOO["an exchanged block"] = Entry(Stack, saying("'blocks.2'", fix="create a new pipeline"), change=_exchanges_block)
ZOO["an exchanged module inside of a block"] = Entry(
    lambda: Stack(Scaled), saying("'blocks.2.layer'", fix="create a new pipeline"), change=_exchanges_inside
)
ZOO["an exchanged block of a Sequential"] = Entry(
    lambda: nn.Sequential(*[Scaled() for _ in range(6)]),
    saying("'2.layer'", fix="create a new pipeline"),
    change=lambda model, step: setattr(model[2], "layer", linear() if step == 1 else model[2].layer),
)
ZOO["a frozen parameter by which the forward decides"] = Entry(
    lambda: AsksFrozen(), change=lambda model, step: model.blocks[5].requires_grad_(step != 1) and None
)


class AsksFrozen(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return x * 2 if self.blocks[5].weight.requires_grad else x


@refused("a counter between blocks", "'count'", fix="inside a block")
class Counts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return super().forward(x) * self.count


@refused("a counter in a dict between blocks", "'state'", fix="inside a block")
class CountsInDict(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"count": 0}

    def forward(self, x: Tensor) -> Any:
        self.state["count"] += 1
        return super().forward(x) * self.state["count"]


@refused("a first batch that is remembered", "'first'", fix="inside a block")
class First(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None

    def between(self, x: Tensor, at: int) -> Any:
        if self.first is None:
            self.first = x.detach().mean()
        return x * self.first


@right("positions that are made once")
class Positions(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.positions: Any = None

    def between(self, x: Tensor, at: int) -> Any:
        if self.positions is None:
            self.positions = torch.arange(WIDTH) / WIDTH
        return x + self.positions


@right("an attribute that is set before it is read")
class Notes(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        self.last, self.at = x, at
        return self.last * (1 + self.at)


class CountsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = linear(), 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.layer(x) * (1 + self.count % 3)


ZOO["a counter inside of blocks"] = Entry(lambda: Stack(CountsInside))


@refused("a block that counts is called on several stages", "the model has 2 blocks for 4 stages", either=True)
class CountsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = CountsInside(), linear()

    def forward(self, x: Tensor) -> Any:
        for _ in range(5):
            x = self.block(x)
        return self.head(x)


@refused("a block's counter read between blocks", "'count' of 'blocks.0'")
class ReadsCount(Stack):
    def __init__(self) -> None:
        super().__init__(CountsInside)

    def between(self, x: Tensor, at: int) -> Any:
        return x * (1 + self.blocks[0].count)


class ReadsOther(nn.Module):
    other: Any

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.layer = linear()
        self.__dict__["other"] = other

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * (1 + self.other.count)


def _reads_other() -> nn.Module:
    counts = CountsInside()
    return _two(counts, ReadsOther(counts))


ZOO["a block that reads another one's counter"] = Entry(_reads_other)


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor, kept: list[Tensor]) -> Any:
        x = self.layer(x)
        kept.append(x * 2)
        return x


@refused("a list that blocks append to", "'blocks.0' changes a list", fix="return")
class PassesList(Stack):
    def __init__(self) -> None:
        super().__init__(Appends)

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept)
        return x + sum(kept)


class Pops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, kept: list[Tensor]) -> Any:
        return self.layer(kept.pop())


@refused("a list that blocks take from", "'blocks.0' changes a list", fix="return")
class TakesList(Stack):
    def __init__(self) -> None:
        super().__init__(Pops)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block([2 * x, x])
        return x
