"""Blocks that keep something in an attribute, as users write them: each a kind of state for tests and benchmarks."""

# ruff: noqa: D101, D102

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 4


class Keeps(nn.Module):
    """A layer whose output is scaled by what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.begin()

    def begin(self) -> None:
        """Keep something."""

    def scale(self, x: Tensor) -> Any:
        """Return a factor, and change what is kept."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.layer(x)) * self.scale(x.detach())


class Counter(Keeps):
    def begin(self) -> None:
        self.calls = 0

    def scale(self, x: Tensor) -> Any:
        self.calls += 1
        return 1 + self.calls % 3


class Appears(Keeps):
    """Keeps nothing at first."""

    def scale(self, x: Tensor) -> Any:
        self.seen = getattr(self, "seen", 0.0) * 0.5 + float(x.mean())
        return 1 + self.seen


class Late(Keeps):
    """Begins to keep something else in its tenth forward, which is in the third step."""

    def begin(self) -> None:
        self.calls = 0
        self.mean: Any = None

    def scale(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls > 10:
            self.mean = x.mean() if self.mean is None else 0.5 * (self.mean + x.mean())
        return 1 if self.mean is None else 1 + self.mean


class LateList(Keeps):
    """Makes a list in its tenth forward, and changes it in later ones."""

    def begin(self) -> None:
        self.calls = 0

    def scale(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls == 10:
            self.means = [1.0]
        elif self.calls > 10:
            self.means.append(float(x.mean()))
        return 1 if self.calls < 10 else sum(self.means)


class OwnGenerator(Keeps):
    def begin(self) -> None:
        self.chance = torch.Generator().manual_seed(3)

    def scale(self, x: Tensor) -> Any:
        return torch.rand(x.shape, generator=self.chance)


class LateGenerator(OwnGenerator):
    def begin(self) -> None:
        super().begin()
        self.calls = 0

    def scale(self, x: Tensor) -> Any:
        self.calls += 1
        return super().scale(x) if self.calls > 6 else 1


class NumpyGenerator(Keeps):
    def begin(self) -> None:
        self.chance = np.random.default_rng(3)

    def scale(self, x: Tensor) -> Any:
        return 1 + self.chance.random()


class NumpyState(Keeps):
    def begin(self) -> None:
        self.tools = {"chance": np.random.RandomState(3)}

    def scale(self, x: Tensor) -> Any:
        return 1 + self.tools["chance"].rand()


class PythonChance(Keeps):
    def begin(self) -> None:
        self.chance = random.Random(3)

    def scale(self, x: Tensor) -> Any:
        return 1 + self.chance.random()


class MeanInPlace(Keeps):
    def begin(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def scale(self, x: Tensor) -> Any:
        self.mean.mul_(0.5).add_(x.mean(0))
        return 1 + self.mean.clone()


class MeanReplaced(Keeps):
    def begin(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def scale(self, x: Tensor) -> Any:
        self.mean = 0.5 * self.mean + x.mean(0)
        return 1 + self.mean


class MeanInTuple(Keeps):
    def begin(self) -> None:
        self.means = (torch.zeros(WIDTH), "unused")

    def scale(self, x: Tensor) -> Any:
        self.means[0].mul_(0.5).add_(x.mean(0))
        return 1 + self.means[0].clone()


class View(Keeps):
    """Two attributes with one memory."""

    def begin(self) -> None:
        self.table = torch.zeros(2, WIDTH)
        self.row = self.table[1]

    def scale(self, x: Tensor) -> Any:
        self.row += x.mean(0)
        return 1 + self.table.sum(0)


class Hidden(Keeps):
    """Carries a hidden state from microbatch to microbatch."""

    def begin(self) -> None:
        self.hidden: Any = None

    def scale(self, x: Tensor) -> Any:
        hidden = torch.zeros_like(x) if self.hidden is None else self.hidden
        self.hidden = torch.tanh(hidden + x)
        return 1 + hidden


class Window(Keeps):
    def begin(self) -> None:
        self.last: deque[float] = deque([1.0], maxlen=3)

    def scale(self, x: Tensor) -> Any:
        self.last.append(float(x.abs().mean()))
        return sum(self.last)


class Table(Keeps):
    def begin(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def scale(self, x: Tensor) -> Any:
        self.seen.setdefault("means", []).append(x.mean())
        return 1 + torch.stack(self.seen["means"]).mean()


class Renewed(Keeps):
    """Has another dict each time, and changes it as well."""

    def begin(self) -> None:
        self.state: dict[str, Any] = {"calls": 0, "mean": torch.zeros(())}

    def scale(self, x: Tensor) -> Any:
        self.state["calls"] += 1
        self.state["mean"] += x.mean()
        self.state = {"calls": self.state["calls"], "mean": self.state["mean"].clone()}
        return self.state["calls"] % 3 + self.state["mean"]


@dataclass
class Notes:
    calls: int = 0
    means: list[float] = field(default_factory=list)


class Object(Keeps):
    def begin(self) -> None:
        self.notes = Notes()

    def scale(self, x: Tensor) -> Any:
        self.notes.calls += 1
        self.notes.means.append(float(x.mean()))
        return self.notes.calls % 3 + self.notes.means[-1]


class Array(Keeps):
    def begin(self) -> None:
        self.mean = np.zeros(WIDTH, dtype=np.float32)

    def scale(self, x: Tensor) -> Any:
        self.mean *= 0.5
        self.mean += x.mean(0).numpy()
        return 1 + torch.from_numpy(self.mean.copy())


class DropsAndCounts(Counter):
    """Draws from torch's generators too: its first forward starts again, seeded."""

    def forward(self, x: Tensor) -> Any:
        return functional.dropout(super().forward(x), 1e-9)


class NeedsGradient(Counter):
    """Takes a gradient inside its forward: its first forward starts again, with a graph."""

    def scale(self, x: Tensor) -> Any:
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad((leaf * leaf).sum() * super().scale(x), leaf)
        return 1 + gradient


ATTRIBUTES: list[type[Keeps]] = [
    Counter, Appears, Late, LateList, OwnGenerator, LateGenerator, NumpyGenerator, NumpyState, PythonChance,
    MeanInPlace, MeanReplaced, MeanInTuple, View, Hidden, Window, Table, Renewed, Object, Array, DropsAndCounts,
    NeedsGradient,
]  # fmt: skip
