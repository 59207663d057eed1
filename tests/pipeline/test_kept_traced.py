"""What traced models keep and change between blocks: plain training's over five steps, or one refusal by name."""

from __future__ import annotations

import contextvars
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.pipeline.pipeline import Pipeline
from matrices import matrix, some_of
from refused import refused
from some import some

pytestmark = pytest.mark.torch
WIDTH, ROWS, NUM_MICROBATCHES, NUM_STEPS = 4, 8, 4, 5
SCHEDULES = [("1f1b", "none"), ("zb-h1", "none"), ("zb-v", "none"), ("gpipe", "full"), ("dualpipe", "none")]
NUMBERS = itertools.cycle([0.5, 1.0, 1.5])
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Model(nn.Module):
    """Does something between its second block and its third."""

    def __init__(self, kind: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(5))
        self.begin()

    def begin(self) -> None:
        """Keep something."""

    def between(self, x: Tensor) -> Tensor:
        """Use what is kept, and change it."""
        return x

    def change(self, step: int) -> None:
        """Change what is kept before a step, as a user's loop does."""

    def kept(self) -> list[Tensor]:
        """Return what training leaves."""
        return []

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                x = self.between(x)
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, WIDTH, generator=chance)


def made(kind: type[Model]) -> Model:
    torch.manual_seed(0)
    return kind()


def state_of(model: Model, named: Any) -> dict[str, Tensor]:
    """Return copies of the weights, and of what is kept."""
    kept = ((f"kept {number}", tensor) for number, tensor in enumerate(model.kept()))
    return {name: tensor.detach().clone() for name, tensor in (*some(named), *kept)}


def plainly(kind: type[Model]) -> list[dict[str, Tensor]]:
    """Return the weights, and what is kept, after every step of a plain loop over microbatches."""
    model, found = made(kind), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        model.change(step)
        sgd.zero_grad()
        x, y = batch(step)
        for part, wanted in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
            torch.autograd.backward(functional.mse_loss(model(part), wanted) / NUM_MICROBATCHES)
        sgd.step()
        found.append(state_of(model, model.named_parameters()))
    return found


def piped(kind: type[Model], schedule: str, checkpoint: str = "none") -> list[dict[str, Tensor]]:
    """Return the same of a pipeline, whose first step nobody checks."""
    model, found = made(kind), []
    with Pipeline(
        model,
        loss_fn=functional.mse_loss,
        schedule=schedule,
        num_ranks=2,
        num_microbatches=NUM_MICROBATCHES,
        checkpoint=checkpoint,
        balance="even",
        check_model=False,
        record=False,
        example=batch(0)[0],
    ) as pipe:
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.05)
        for step in range(NUM_STEPS):
            model.change(step)
            sgd.zero_grad()
            x, y = batch(step)
            pipe.step(x, target=y)
            sgd.step()
            pipe.settle()
            found.append(state_of(model, pipe.named_parameters()))
    return found


def is_as_in_plain_training(kind: type[Model], schedule: str, checkpoint: str) -> None:
    torch.testing.assert_close(piped(kind, schedule, checkpoint), plainly(kind), rtol=2e-5, atol=1e-6)


class MeanInPlace(Model):
    def begin(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x * (1 + self.mean)

    def kept(self) -> list[Tensor]:
        return [self.mean]


class MeanByOperators(MeanInPlace):
    def between(self, x: Tensor) -> Tensor:
        self.mean *= 0.9
        self.mean += x.detach().mean(0)
        return x * (1 + self.mean)


class MeanOut(MeanInPlace):
    def between(self, x: Tensor) -> Tensor:
        torch.add(0.9 * self.mean, x.detach().mean(0), out=self.mean)
        return x * (1 + self.mean)


class MeansOfAList(MeanInPlace):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_mul_([self.mean], 0.9)
            torch._foreach_add_([self.mean], [x.mean(0)])
        return x * (1 + self.mean)


class MeanInARow(MeanInPlace):
    def begin(self) -> None:
        self.mean = torch.zeros(2, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        row = self.mean[0]
        row.mul_(0.9).add_(x.detach().mean(0))
        self.mean[1] = row
        return x * (1 + self.mean[1])


class MeanExchanged(MeanInPlace):
    """Another tensor takes its place after two steps."""

    def change(self, step: int) -> None:
        if step == 2:
            self.mean = torch.ones(WIDTH)


class Teacher(Model):
    """The mean of a trained layer's weights, taken in the forward, as BYOL and MoCo do."""

    def begin(self) -> None:
        self.head, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.teacher.load_state_dict(self.head.state_dict())

    def follow(self) -> None:
        """Let the teacher follow."""
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)

    def between(self, x: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            wanted = self.teacher(x)
        return torch.tanh(self.head(x)) * (1 + wanted)

    def kept(self) -> list[Tensor]:
        return [self.teacher.weight]


class TeacherByData(Teacher):
    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            own.data = 0.9 * own.data + 0.1 * other.data


class Queue(Teacher):
    """MoCo's queue of what the teacher returned, in a buffer."""

    def begin(self) -> None:
        super().begin()
        self.register_buffer("queue", torch.zeros(8, WIDTH))

    def between(self, x: Tensor) -> Tensor:
        self.follow()
        queue = self.queue.clone()
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[len(x) :], self.teacher(x)]))
        return torch.tanh(self.head(x)) + (x @ queue.T).mean(1, keepdim=True)


CARRIED = [
    MeanInPlace,
    MeanByOperators,
    MeanOut,
    MeansOfAList,
    MeanInARow,
    MeanExchanged,
    Teacher,
    TeacherByData,
    Queue,
]


@matrix("kind, schedule", CARRIED, SCHEDULES)
def test_tensors_that_change_between_blocks_are_those_of_plain_training(
    kind: type[Model], schedule: tuple[str, str]
) -> None:
    if schedule[0] == "dualpipe":
        with refused(
            ModelError, "of block 'layers.1|teacher.* changes the (buffer|frozen parameter) '.*'", fix="one copy"
        ):
            piped(kind, *schedule)
    else:
        is_as_in_plain_training(kind, *schedule)


class ActByName(Model):
    """Uses another of torch's functions from the third step on."""

    def begin(self) -> None:
        self.act: Any = torch.tanh

    def between(self, x: Tensor) -> Tensor:
        made: Tensor = self.act(x)
        return made

    def change(self, step: int) -> None:
        self.act = torch.relu if step >= 2 else torch.tanh


class ActInAList(Model):
    def begin(self) -> None:
        self.acts: list[Any] = [functional.gelu]

    def between(self, x: Tensor) -> Tensor:
        made: Tensor = self.acts[0](x)
        return made

    def change(self, step: int) -> None:
        self.acts[0] = functional.silu if step >= 2 else functional.gelu


class ScaleInAVariable(Model):
    def between(self, x: Tensor) -> Tensor:
        return x * SCALE.get()

    def change(self, step: int) -> None:
        SCALE.set(1.0 + step)


class Settings:
    """What a model refers to."""

    scale = 1.0


SETTINGS = Settings()


class ScaleByAReference(Model):
    def begin(self) -> None:
        self.settings = weakref.ref(SETTINGS)

    def between(self, x: Tensor) -> Tensor:
        settings: Any = self.settings()
        return x * float(settings.scale)

    def change(self, step: int) -> None:
        SETTINGS.scale = 1.0 + step


class ScaleInDict(Model):
    """Reads an attribute past its modules' way to read attributes."""

    def begin(self) -> None:
        self.scale = 1.0

    @property
    def own(self) -> dict[str, Any]:
        """Return all attributes."""
        return self.__dict__

    def between(self, x: Tensor) -> Tensor:
        made: Tensor = x * self.own["scale"]
        return made

    def change(self, step: int) -> None:
        vars(self)["scale"] = 1.0 + step


class AsksForASetting(Model):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if torch.backends.mkldnn.enabled else x

    def change(self, step: int) -> None:
        torch.backends.mkldnn.enabled = step % 2 == 1  # type: ignore[assignment]


class TensorAppears(Model):
    def between(self, x: Tensor) -> Tensor:
        bias = getattr(self, "bias", None)
        return x if bias is None else x + bias

    def change(self, step: int) -> None:
        if step == 2:
            self.bias = torch.full((WIDTH,), 0.5)


class TensorFilled(Model):
    def begin(self) -> None:
        self.scale = torch.ones(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale

    def change(self, step: int) -> None:
        self.scale.data.fill_(1.0 + step)


class ArrayFilled(TensorFilled):
    def begin(self) -> None:
        self.numbers = np.ones(1)

    def between(self, x: Tensor) -> Tensor:
        return x * float(self.numbers[0])

    def change(self, step: int) -> None:
        self.numbers.fill(1.0 + step)


CHANGED = [
    ActByName, ActInAList, ScaleInAVariable, ScaleByAReference, ScaleInDict, AsksForASetting, TensorAppears,
    TensorFilled, ArrayFilled,
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    enabled = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = enabled
    SCALE.set(1.0)


@matrix("kind, schedule", CHANGED, SCHEDULES, times=1)
def test_what_a_loop_changes_between_steps_is_followed(kind: type[Model], schedule: tuple[str, str]) -> None:
    is_as_in_plain_training(kind, *schedule)


class TakesFromAnIterator(Model):
    def begin(self) -> None:
        self.numbers: Any = iter([0.5, 1.0, 1.5] * 100)

    def between(self, x: Tensor) -> Tensor:
        made: Tensor = x * next(self.numbers)
        return made


class TakesFromAGenerator(TakesFromAnIterator):
    def begin(self) -> None:
        self.numbers = {"all": (number / 7 for number in range(1000))}

    def between(self, x: Tensor) -> Tensor:
        made: Tensor = x * next(self.numbers["all"])
        return made


class TakesFromAGlobal(Model):
    def between(self, x: Tensor) -> Tensor:
        return x * next(NUMBERS)


class Draws(Model):
    def begin(self) -> None:
        self.chance: Any = random.Random(1)

    def between(self, x: Tensor) -> Tensor:
        made: Tensor = x * self.chance.random()
        return made


class DrawsFromTheSystem(Draws):
    def begin(self) -> None:
        self.chance = random.SystemRandom()


class DrawsFromNumPy(Draws):
    def begin(self) -> None:
        self.chance = np.random.default_rng(1)


class DrawsATensor(Draws):
    def begin(self) -> None:
        self.chance = torch.Generator().manual_seed(1)

    def between(self, x: Tensor) -> Tensor:
        return x + torch.rand(WIDTH, generator=self.chance)


class Counts(Model):
    def begin(self) -> None:
        self.calls = {"all": 0}

    def between(self, x: Tensor) -> Tensor:
        self.calls["all"] += 1
        return x * (1 + self.calls["all"] % 3)


class MeanInAList(Model):
    def begin(self) -> None:
        self.means = [torch.zeros(WIDTH)]

    def between(self, x: Tensor) -> Tensor:
        self.means[0] += x.detach().mean(0)
        return x * (1 + self.means[0])


class MeanReplaced(Model):
    def begin(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return x * (1 + self.mean)


class MeanByData(MeanReplaced):
    def between(self, x: Tensor) -> Tensor:
        self.mean.data = 0.9 * self.mean + x.detach().mean(0)
        return x * (1 + self.mean)


class MeanTwice(MeanReplaced):
    def begin(self) -> None:
        super().begin()
        self.view = self.mean.view(2, 2)

    def between(self, x: Tensor) -> Tensor:
        self.mean.add_(x.detach().mean(0))
        return x * (1 + self.view.flatten())


class MeanAppears(MeanReplaced):
    """The forward changes a tensor that was not there when the model was cut."""

    def begin(self) -> None:
        pass

    def between(self, x: Tensor) -> Tensor:
        if hasattr(self, "mean"):
            self.mean.add_(x.detach().mean(0))
            return x * (1 + self.mean)
        return x

    def change(self, step: int) -> None:
        if step == 2:
            self.mean = torch.zeros(WIDTH)


REFUSED: list[tuple[type[Model], str, str]] = [
    (TakesFromAnIterator, "takes from the model's attribute 'numbers', a list_iterator, between", "as an input"),
    (TakesFromAGenerator, "takes from the model's attribute 'numbers', a generator, between", "as an input"),
    (TakesFromAGlobal, "takes from the variable 'NUMBERS', a cycle, between its blocks, in `", "as an input"),
    (Draws, "draws from the model's attribute 'chance', a Random, between", "draw it inside a block"),
    (DrawsFromTheSystem, "takes from the model's attribute 'chance', a SystemRandom, between", "inside a block"),
    (DrawsFromNumPy, "draws from the model's attribute 'chance', a Generator, between", "draw it inside a block"),
    (DrawsATensor, "draws from a generator of its own between its blocks, in `", "draw it inside a block"),
    (Counts, "changes the model's attribute 'calls' between its blocks", "change it inside a block"),
    (MeanInAList, "changes a tensor in the model's attribute 'means' between its blocks", "self.register_buffer"),
    (MeanReplaced, "changes the model's attribute 'mean' between its blocks", "change it inside a block"),
    (MeanByData, "assigns to `.data` of a tensor between its blocks, in `self.mean.data", "into a block"),
    (MeanTwice, "changes the tensor 'mean' in place between its blocks, and 'view' is of the same memory", "clone()"),
    (MeanAppears, "changes the tensor 'mean' in place between its blocks", "create a new pipeline"),
]


@matrix("case, schedule", REFUSED, SCHEDULES, times=1)
def test_what_no_stage_can_keep_is_refused_by_name(
    case: tuple[type[Model], str, str], schedule: tuple[str, str]
) -> None:
    kind, error, fix = case
    with refused(ModelError, error, fix=fix):
        piped(kind, *schedule)


class KeepsInADict(Layer):
    """Keeps a mean in a dict, replaced or changed in place."""

    in_place = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"mean": torch.zeros(WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.layer(x)) * (1 + self.seen["mean"])
        if self.in_place:
            self.seen["mean"].mul_(0.5).add_(made.detach().mean(0))
        else:
            self.seen["mean"] = 0.5 * self.seen["mean"] + made.detach().mean(0)
        return made


class ChangesInADict(KeepsInADict):
    in_place = True


class Draw(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + torch.rand(WIDTH, generator=self.chance)


class OfDicts(Model):
    def __init__(self) -> None:
        super().__init__(KeepsInADict)


class OfDictsInPlace(Model):
    def __init__(self) -> None:
        super().__init__(ChangesInADict)


class OfDraws(Model):
    def __init__(self) -> None:
        super().__init__(Draw)


@matrix("kind, schedule", [OfDicts, OfDictsInPlace, OfDraws], some_of(SCHEDULES, SCHEDULES[:4]), times=1)
def test_blocks_of_a_traced_model_keep_dicts_of_tensors_and_generators(
    kind: type[Model], schedule: tuple[str, str]
) -> None:
    if schedule[0] == "dualpipe":
        with refused(ModelError, "block 'layers.. changes its attribute '(seen|chance)'", fix="one copy of each stage"):
            piped(kind, *schedule)
    else:
        is_as_in_plain_training(kind, *schedule)
