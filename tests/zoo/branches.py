"""Branches on what Python asks tensors for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.entry import WIDTH, ZOO, Entry, Stack, linear, refused, right

ASKS: dict[str, Callable[[Tensor], bool]] = {
    "requires_grad": lambda x: x.requires_grad,
    "grad_fn": lambda x: x.grad_fn is not None,
    "the name of grad_fn": lambda x: type(x.grad_fn).__name__ == "AddmmBackward0",
    "is_leaf": lambda x: not x.is_leaf,
    "is_contiguous()": lambda x: not x.t().is_contiguous(),
    "stride()": lambda x: x.t().stride() == (1, WIDTH),
    "grad mode": lambda x: torch.is_grad_enabled(),
    "is_inference()": lambda x: not x.is_inference(),
    "_version": lambda x: x._version == 0,
    "the type": lambda x: type(x) in (Tensor, nn.Parameter),
}
for what, ask in ASKS.items():

    def asking(ask: Any = ask) -> nn.Module:
        class Asks(Stack):
            def between(self, x: Tensor, at: int) -> Any:
                return x * 2 if ask(x) else x

        return Asks()

    ZOO[f"a branch on {what}"] = Entry(asking)

# What nothing but a comparison with the model itself can see: Python is not asked when it looks at a type.
ONLY_BY_CHECK = frozenset({"a branch on the type"})


class Transposes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x if x.shape[-1] == WIDTH else x.t()).t()


@right("a branch on what blocks hand over transposed")
class AsksTransposed(Stack):
    def __init__(self) -> None:
        super().__init__(Transposes)

    def between(self, x: Tensor, at: int) -> Any:
        return x.contiguous().t() if x.is_contiguous() else 2 * x.t()


class AsksInside(nn.Module):
    def __init__(self, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.ask = linear(), ask

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * (2 if self.ask(x) else 1)


for what in ("requires_grad", "grad_fn", "is_leaf"):
    ask = ASKS[what]
    ZOO[f"a branch on {what} inside of two blocks"] = Entry(
        lambda ask=ask: _two(AsksInside(ask), AsksInside(ask))  # type: ignore[misc]
    )


def _two(first: nn.Module, second: nn.Module) -> nn.Module:
    model = Stack(count=8)
    model.blocks[2], model.blocks[5] = first, second
    return model


@refused("a branch on the numbers in a tensor", "branches on the values of a tensor", fix="move it into a block")
class Decides(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return -x if x.sum() > 0 else x


@refused("a branch on a number read with item()", "branches on the values of a tensor", fix="move it into a block")
class Items(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return x * max(x.abs().max().item(), 1.0)


@refused("a branch on Python's random numbers", "random", fix="inside a block")
class Drops(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return x


class DecidesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        x = self.layer(x)
        return -x if x.sum() > 0 else x


ZOO["a branch on the numbers in a tensor inside of blocks"] = Entry(lambda: Stack(DecidesInside))


class HookedDecision(Stack):
    """Blocks that cannot run on stand-ins, with hooks that collect what they return."""

    def __init__(self) -> None:
        super().__init__(DecidesInside)

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        handles = [block.register_forward_hook(lambda module, given, made: kept.append(made)) for block in self.blocks]
        made = super().forward(x)
        for handle in handles:
            handle.remove()
        return made + torch.stack(kept).sum(0)


ZOO["hooks on blocks that decide by numbers"] = Entry(HookedDecision)


@refused("hooks inside of blocks that decide by numbers", "created but did not return")
class InnerFeatures(Stack):
    def __init__(self) -> None:
        super().__init__(DecidesInside)

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        handles = [
            block.layer.register_forward_hook(lambda module, given, made: kept.append(made)) for block in self.blocks
        ]
        made = super().forward(x)
        for handle in handles:
            handle.remove()
        return made + torch.stack(kept).sum(0)
