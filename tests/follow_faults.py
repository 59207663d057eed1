"""A model that is no chain, and faults planted into how it is followed: what `verify` and the check have to find."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.model.blocks.pieces import Piece
from drumline.model.blocks.script import Live
from drumline.model.follow.skeleton import Skeleton

WIDTH = 6


class CountedNorm(nn.BatchNorm1d):
    """A block that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Skips(nn.Module):
    """A value skips two blocks, a hook turns what a block returns, and an attribute scales what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.norm = CountedNorm(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.scale = 2.0
        self.layers[1].register_forward_hook(lambda module, given, made: made * 1.5)

    def forward(self, x: Tensor) -> Any:
        first = self.drop(self.layers[0](x * self.scale))
        middle = self.layers[2](self.layers[1](first).tanh())
        return self.layers[3](self.norm(middle + first))


def _around(patch: pytest.MonkeyPatch, change: Callable[[Piece, Callable[[], Any]], Any]) -> None:
    right = Piece.__call__
    patch.setattr(Piece, "__call__", lambda self, value: change(self, lambda: right(self, value)))


def dropped_hook(patch: pytest.MonkeyPatch) -> None:
    """Run blocks without the hooks that return something."""

    def change(piece: Piece, run: Callable[[], Any]) -> Any:
        kept = [(module, module._forward_hooks) for module in piece.modules() if module._forward_hooks]
        for module, _ in kept:
            module._forward_hooks = OrderedDict()
        try:
            return run()
        finally:
            for module, hooks in kept:
                module._forward_hooks = hooks

    _around(patch, change)


def wrong_hook(patch: pytest.MonkeyPatch) -> None:
    """Run what hooks return once more through them."""

    def change(piece: Piece, run: Callable[[], Any]) -> Any:
        made = run()
        if isinstance(made, Live) and any(module._forward_hooks for module in piece.modules()):
            return made._replace(tensors=tuple(tensor * 1.5 for tensor in made.tensors))
        return made

    _around(patch, change)


def lost_path(patch: pytest.MonkeyPatch) -> None:
    """Cut one of the values that ride along off from what it was made of."""

    def change(piece: Piece, run: Callable[[], Any]) -> Any:
        made = run()
        if isinstance(made, Live) and len(made.tensors) > 1:
            return made._replace(tensors=(made.tensors[0].detach(), *made.tensors[1:]))
        return made

    _around(patch, change)


def stale_attribute(patch: pytest.MonkeyPatch) -> None:
    """Follow the model with an attribute that it had before."""
    right = Skeleton.__init__

    def made(self: Skeleton, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        right(self, model, *args, **kwargs)
        for module in self.model.modules():
            if hasattr(module, "scale"):
                setattr(module, "scale", 1.0)  # noqa: B010 - modules are typed to hold tensors

    patch.setattr(Skeleton, "__init__", made)


FAULTS = [dropped_hook, wrong_hook, lost_path, stale_attribute]


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def make() -> Any:
    """Return what `verify` takes."""
    return Skips(), nn.functional.mse_loss, *data()
