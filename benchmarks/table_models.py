"""Models of the matrix of state whose blocks keep tables for each other: rotary angles, slopes, masks.

Such a table depends on no input. Each process may make its own, so it ties no blocks together.
"""

# ruff: noqa: D101, D102

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from state_kinds import WIDTH, Keeps

TABLES: dict[Any, Any] = {}


def begin_anew() -> None:
    """Let nobody have made a table."""
    TABLES.clear()
    angles.cache_clear()
    OfTheClass.table = None


@functools.lru_cache(maxsize=1)
def angles(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions."""
    steps = torch.outer(torch.arange(length, dtype=torch.float32), 1 / 100 ** torch.linspace(0, 1, width))
    return steps.cos(), steps.sin()


class Rotates(Keeps):
    """Calls a function with a memory."""

    def scale(self, x: Tensor) -> Any:
        cos, sin = angles(x.shape[0], x.shape[1])
        return cos + 0.5 * sin


class InADict(Keeps):
    """Has sines in a dict of the module, made in place."""

    def scale(self, x: Tensor) -> Any:
        key = x.shape[0], x.dtype
        if key not in TABLES:
            table = x.new_zeros(len(x), WIDTH)
            table[:, 0::2] = torch.arange(len(x), dtype=x.dtype)[:, None].sin()
            table[:, 1::2] = table[:, 0::2].cos()
            TABLES[key] = table.add_(1)
        return TABLES[key]


class Masks(Keeps):
    """Has a mask like its scores in a dict of the module."""

    def scale(self, x: Tensor) -> Any:
        scores = x @ x.t()
        if scores.shape not in TABLES:
            TABLES[scores.shape] = torch.full_like(scores, float("-inf")).triu(1)
        return 1 + (scores + TABLES[scores.shape]).softmax(-1) @ x.detach()


class OfTheClass(Keeps):
    table: Any = None

    def scale(self, x: Tensor) -> Any:
        if type(self).table is None:
            type(self).table = 2.0 ** -torch.arange(WIDTH)
        return type(self).table


class Rotary(nn.Module):
    """Makes a table when it is first called, from a buffer."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.5, 1.5, WIDTH))
        self.cosines: Any = None

    def forward(self, length: int) -> Any:
        if self.cosines is None:
            self.cosines = torch.outer(torch.arange(length, dtype=torch.float32), self.frequencies).cos()
        return self.cosines[:length]


class Shares(Keeps):
    """Has a module that all blocks have."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def scale(self, x: Tensor) -> Any:
        return self.rotary(len(x))


def sharing() -> nn.Sequential:
    rotary = Rotary()
    return nn.Sequential(*(Shares(rotary) for _ in range(4)))


class Begins(Keeps):
    """Has what it makes of the first batch in a dict of the module: no table."""

    def scale(self, x: Tensor) -> Any:
        if WIDTH not in TABLES:
            TABLES[WIDTH] = x.detach().mean(0)
        return 1 + TABLES[WIDTH]


class Doubles(Keeps):
    """Changes the table of all blocks with every call."""

    def scale(self, x: Tensor) -> Any:
        table = TABLES.setdefault(WIDTH, torch.ones(WIDTH))
        return table.mul_(0.9).clone()
