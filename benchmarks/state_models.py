"""Models of the matrix of state, beyond attributes of blocks: state outside, shared, used up, between blocks.

Each is a `Make`: four blocks, or a model that does something between them. `TURNS` let a user change something before a
step, as users do.
"""

# ruff: noqa: D101, D102

from __future__ import annotations

import contextvars
import copy
import io
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import table_models
from state_kinds import WIDTH, Keeps

Make = Callable[[], nn.Sequential]
STATE: dict[str, Any] = {}
TURN: contextvars.ContextVar[float] = contextvars.ContextVar("TURN", default=1.0)


def begin_anew() -> None:
    """Let what is outside of models be as it was at first."""
    table_models.begin_anew()
    STATE.clear()
    STATE["calls"] = 0
    TURN.set(1.0)
    random.seed(0)
    torch.use_deterministic_algorithms(False)


class Plain(Keeps):
    def scale(self, x: Tensor) -> Any:
        return 1


def row(*blocks: nn.Module) -> nn.Sequential:
    """Return four blocks, these last."""
    return nn.Sequential(*(Plain() for _ in range(4 - len(blocks))), *blocks)


def layers() -> nn.Sequential:
    """Return four blocks that keep nothing."""
    return row()


class Takes(Keeps):
    """Takes from something that cannot be taken back."""

    def __init__(self, values: Any, take: Callable[[Any], Any] = next) -> None:
        super().__init__()
        self.values, self.take = values, take

    def scale(self, x: Tensor) -> Any:
        return 1 + self.take(self.values)


def numbers() -> Iterator[float]:
    """Yield numbers, without end."""
    yield from itertools.cycle([0.5, 1.0, 1.5])


def lines() -> io.StringIO:
    """Return an open file of numbers."""
    return io.StringIO("0.5\n1.0\n1.5\n" * 100)


def loader() -> Any:
    """Return the iterator of a loader."""
    values: Any = [0.5, 1.0, 1.5] * 100
    return iter(torch.utils.data.DataLoader(values))


def following(values: Any) -> float:
    return float(next(values))


def read(file: Any) -> float:
    return float(file.readline())


def nothing_of(chance: random.SystemRandom) -> float:
    return 0 * chance.random()


class Locked(Keeps):
    """Waits for a lock, which nobody can copy."""

    def begin(self) -> None:
        self.lock, self.calls = threading.Lock(), 0

    def scale(self, x: Tensor) -> Any:
        with self.lock:
            return 1.5


class Teacher(Keeps):
    """Lets frozen weights follow its own in its forward, and uses them."""

    def begin(self) -> None:
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    @torch.no_grad()
    def scale(self, x: Tensor) -> Any:
        for mine, theirs in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            mine.mul_(0.5).add_(theirs, alpha=0.5)
        return self.teacher(x)


class HiddenTeacher(Teacher):
    """Has it in a list."""

    def begin(self) -> None:
        self.teachers = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    @property
    def teacher(self) -> Any:  # type: ignore[override]
        return self.teachers[0]


class BufferInPlace(Keeps):
    mean: Tensor

    def begin(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def scale(self, x: Tensor) -> Any:
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return 1 + self.mean.clone()


class BufferReplaced(BufferInPlace):
    def scale(self, x: Tensor) -> Any:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return 1 + self.mean


class Behind(Keeps):
    """Keeps a number behind a property, in its __dict__."""

    def begin(self) -> None:
        self.__dict__["_number"] = 0

    @property
    def number(self) -> int:
        return int(self.__dict__["_number"])

    @number.setter
    def number(self, value: int) -> None:
        self.__dict__["_number"] = value

    def scale(self, x: Tensor) -> Any:
        self.number += 1
        return 1 + self.number % 3


class Notes:
    calls = 0


class ByReference(Keeps):
    """Counts in an object that it knows by a weak reference."""

    def begin(self) -> None:
        self.notes = [Notes()]
        self.by = weakref.ref(self.notes[0])

    def scale(self, x: Tensor) -> Any:
        notes = self.by()
        assert notes is not None
        notes.calls += 1
        return 1 + notes.calls % 3


class InAGlobal(Keeps):
    def scale(self, x: Tensor) -> Any:
        STATE["calls"] += 1
        return 1 + STATE["calls"] % 3


class InAVariable(Keeps):
    def scale(self, x: Tensor) -> Any:
        TURN.set(TURN.get() * 0.5 + float(x.mean()))
        return 1 + TURN.get()


class InTheClass(Keeps):
    calls = 0

    def begin(self) -> None:
        type(self).calls = 0

    def scale(self, x: Tensor) -> Any:
        type(self).calls += 1
        return 1 + type(self).calls % 3


class InAClosure(Keeps):
    def begin(self) -> None:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def scale(self, x: Tensor) -> Any:
        return 1 + self.count() % 3


class Draws(Keeps):
    """Draws from a generator that others may have, too."""

    def __init__(self, chance: torch.Generator) -> None:
        super().__init__()
        self.chance = chance

    def scale(self, x: Tensor) -> Any:
        return torch.rand(WIDTH, generator=self.chance)


def one_generator() -> nn.Sequential:
    """Return blocks of two stages that draw from one generator."""
    chance = torch.Generator().manual_seed(3)
    return nn.Sequential(Draws(chance), Plain(), Draws(chance), Plain())


class Uses(Keeps):
    """Uses a tensor in an attribute, which may be another block's weight."""

    def begin(self) -> None:
        self.weight = torch.ones(WIDTH)

    def scale(self, x: Tensor) -> Any:
        return self.weight


def weight_in_an_attribute() -> nn.Sequential:
    """Return blocks of which the third has the memory of the first's bias in a plain attribute."""
    model = nn.Sequential(Plain(), Plain(), Uses(), Plain())
    first, third = model[0], model[2]
    third.weight = first.layer.bias.data  # type: ignore[union-attr]
    return model


class ActsBy(Keeps):
    """Applies a function that a user replaces between steps."""

    def begin(self) -> None:
        self.act: Any = torch.tanh

    def scale(self, x: Tensor) -> Any:
        return self.act(x)


class ReadsAVariable(Keeps):
    def scale(self, x: Tensor) -> Any:
        return TURN.get()


class ReadsASetting(Keeps):
    def scale(self, x: Tensor) -> Any:
        return 2 if torch.are_deterministic_algorithms_enabled() else 1


class ReadsWhatIsThere(Keeps):
    """Adds a tensor that appears after the first step."""

    def scale(self, x: Tensor) -> Any:
        extra: Any = getattr(self, "extra", None)
        return 1 if extra is None else extra


class Around(nn.Module):
    """Calls its blocks one after another, and does something between two of them."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.begin()

    def begin(self) -> None:
        """Keep something."""

    def between(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        for at, block in enumerate(self.blocks):
            x = block(x) + x
            if at == 1:
                x = self.between(x)
        return x


class MeanBetween(Around):
    def begin(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def between(self, x: Tensor) -> Any:
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x + self.mean.clone()


class MeanReplacedBetween(MeanBetween):
    def between(self, x: Tensor) -> Any:
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return x + self.mean


class MeanInAListBetween(Around):
    def begin(self) -> None:
        self.means = [torch.zeros(WIDTH)]

    def between(self, x: Tensor) -> Any:
        self.means[0] += x.detach().mean(0)
        return x + self.means[0].clone()


class TakesBetween(Around):
    def begin(self) -> None:
        self.values = itertools.cycle([0.5, 1.0, 1.5])

    def between(self, x: Tensor) -> Any:
        return x * next(self.values)


class CountsBetween(Around):
    def begin(self) -> None:
        self.calls = 0

    def between(self, x: Tensor) -> Any:
        self.calls += 1
        return x * (1 + self.calls % 3)


class DrawsBetween(Around):
    def begin(self) -> None:
        self.chance = random.Random(3)

    def between(self, x: Tensor) -> Any:
        return x * (1 + self.chance.random())


class TeacherBetween(Around):
    def begin(self) -> None:
        self.student: Any = nn.Linear(WIDTH, WIDTH)
        self.teacher: Any = copy.deepcopy(self.student).requires_grad_(False)

    def between(self, x: Tensor) -> Any:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.5).add_(theirs, alpha=0.5)
        return self.student(x) + self.teacher(x.detach())


class ActsBetween(Around):
    def begin(self) -> None:
        self.act: Any = torch.tanh

    def between(self, x: Tensor) -> Any:
        return self.act(x)


class ReadsBetween(Around):
    def between(self, x: Tensor) -> Any:
        extra: Any = getattr(self, "extra", None)
        x = x * TURN.get() * (2 if torch.are_deterministic_algorithms_enabled() else 1)
        return x if extra is None else x + extra


def another_function(model: nn.Module, step: int) -> None:
    """Replace functions before the third step."""
    for module in model.modules():
        if step == 2 and hasattr(module, "act"):
            setattr(module, "act", torch.relu)  # noqa: B010 - its type is not known


def another_value(model: nn.Module, step: int) -> None:
    """Set what forwards read, before the third step."""
    if step == 2:
        TURN.set(2.0)
    torch.use_deterministic_algorithms(step >= 3)


def another_tensor(model: nn.Module, step: int) -> None:
    """Give modules a tensor before the third step, which they did not have."""
    for module in model.modules():
        if step == 2 and isinstance(module, ReadsWhatIsThere | ReadsBetween):
            module.extra = torch.linspace(0.5, 1.5, WIDTH)
