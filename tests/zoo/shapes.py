"""Models put together in unusual ways."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from zoo.entry import WIDTH, ZOO, Entry, Stack, linear, refused, right


@right("one list of blocks used again")
class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linear() for _ in range(3)])
        self.same = self.blocks

    def forward(self, x: Tensor) -> Any:
        for block in [*self.blocks, *self.same]:
            x = block(x).tanh()
        return x


@right("recursion")
class Recursive(Stack):
    def forward(self, x: Tensor, at: int = 0) -> Any:
        if at == len(self.blocks):
            return x
        return x + self.forward(self.blocks[at](x), at + 1)


@right("a generator of blocks' outputs")
class Generates(Stack):
    def outputs(self, x: Tensor) -> Iterator[Tensor]:
        for block in self.blocks:
            x = block(x)
            yield x

    def forward(self, x: Tensor) -> Any:
        return torch.stack(list(self.outputs(x))).sum(0)


class Pair(NamedTuple):
    x: Tensor
    more: Tensor


@dataclass
class Fields:
    x: Tensor
    more: Tensor


class Wraps(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.wrap = linear(), wrap

    def forward(self, x: Tensor) -> Any:
        x = self.layer(x)
        return self.wrap(x, 2 * x)


WRAPS = {"a named tuple": Pair, "a dataclass": Fields, "a dict": lambda x, more: {"x": x, "more": more}}
for what, wrap in WRAPS.items():

    def wrapping(wrap: Any = wrap) -> nn.Module:
        class Unwraps(Stack):
            def __init__(self) -> None:
                super().__init__(lambda: Wraps(wrap))

            def between(self, x: Any, at: int) -> Any:
                return x["x"] + x["more"].tanh() if isinstance(x, dict) else x.x + x.more.tanh()

        return Unwraps()

    ZOO[f"blocks that return {what}"] = Entry(wrapping)


@right("changes in place and views between blocks")
class InPlace(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        x = x * 1.0
        x[:, 0] = 0.0
        flat = x.view(-1)
        flat.mul_(2.0)
        return flat.view_as(x)


@right("a weight used between blocks")
class Shares(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return functional.linear(x, self.blocks[0].weight)


@right("a weight tied by an attribute")
class Ties(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[5].weight = self.blocks[0].weight


ZOO["weight norm"] = Entry(lambda: Stack(lambda: parametrizations.weight_norm(linear())))
ZOO["spectral norm"] = Entry(lambda: Stack(lambda: parametrizations.spectral_norm(linear())))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _parametrized() -> nn.Module:
    def make() -> nn.Module:
        layer = linear()
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return layer

    return Stack(make)


ZOO["parametrizations"] = Entry(_parametrized)


@refused("parametrizations cached around blocks", "'blocks.0'.*parametrize.cached")
class Cached(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: parametrizations.spectral_norm(linear()))

    def forward(self, x: Tensor) -> Any:
        with parametrize.cached():
            return super().forward(x)


@refused("a tensor that trains and is no parameter", "requires grad but is not a parameter", fix="nn.Parameter")
class Loose(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.loose = torch.ones(WIDTH, requires_grad=True)

    def between(self, x: Tensor, at: int) -> Any:
        return x * self.loose


@right("an input whose requires_grad is set")
class Wants(Stack):
    def forward(self, x: Tensor) -> Any:
        y = x.detach().clone()
        y.requires_grad_(True)
        return super().forward(y * 2 if y.requires_grad else y)


class CallsItself(nn.Module):
    """Does something around its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def __call__(self, x: Tensor) -> Any:
        return 1.5 * super().__call__(x)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


ZOO["blocks whose call does more"] = Entry(lambda: Stack(CallsItself))


@right("a block's forward called by itself")
class Bypasses(Stack):
    def forward(self, x: Tensor) -> Any:
        for at, block in enumerate(self.blocks):
            x = block.forward(x) if at == 2 else block(x)
        return x


@refused(
    "a mark on a tensor for the next block",
    "gives 'blocks.1' a tensor with the attribute 'scale'",
    fix="pass the value next to",
)
class Marks(Stack):
    def __init__(self) -> None:
        super().__init__(ReadsMark)

    def between(self, x: Tensor, at: int) -> Any:
        x.scale = 2.0  # type: ignore[attr-defined]
        return x


class ReadsMark(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * getattr(x, "scale", 1.0)


SEEN: list[Tensor] = []


@refused("hooks collect features in a global list", "changes SEEN", fix="local variable of the forward")
class GlobalFeatures(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, given, made: SEEN.append(made))

    def forward(self, x: Tensor) -> Any:
        SEEN.clear()
        made = super().forward(x)
        return made + torch.stack(SEEN).sum(0)


@functools.lru_cache
def _table(width: int) -> Tensor:
    return torch.arange(width) / width


TABLES: dict[int, Tensor] = {}


class LooksUp(nn.Module):
    """Uses tables that are made once, for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        if WIDTH not in TABLES:
            TABLES[WIDTH] = torch.ones(WIDTH)
        return self.layer(x) + _table(WIDTH) * TABLES[WIDTH]


ZOO["tables that are made once for all blocks"] = Entry(lambda: Stack(LooksUp))


@refused(
    "a hook that the forward puts on a block for a while",
    "adds or removes a hook on 'blocks.2'",
    fix="outside the forward",
)
class HooksForAWhile(Stack):
    def forward(self, x: Tensor) -> Any:
        handle = self.blocks[2].register_forward_hook(lambda module, given, made: 2 * made)
        made = super().forward(x)
        handle.remove()
        return made


@refused("an attribute of a tensor set by hand", "assigns to `.data`", fix="move it into a block")
class SetsData(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        y = x * 1
        y.data = 2 * y.data
        return y
