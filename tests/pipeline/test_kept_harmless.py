"""State that makes no difference is refused nowhere; what only looks harmless is refused by name."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from matrices import mainly, matrix, some_of
from refused import refused
from some import some
from state_pipes import piped

pytestmark = pytest.mark.torch
WIDTH = 4
LOG: list[float] = [0.0]
NOTES = LOG  # another name
SEEN: list[float] = []
LOGGER = logging.getLogger(__name__)
SCHEDULES = [("1f1b", "none"), ("zb-v", "none"), ("gpipe", "full"), ("dualpipe", "none")]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(WIDTH, WIDTH)
        self.begin()

    def begin(self) -> None:
        """Keep something."""

    def note(self, y: Tensor) -> Any:
        """Note something about what is returned, and return a factor."""
        return 1

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.layer(x))
        return y * self.note(y.detach()) + x


class PrintsItsCalls(Layer):
    def begin(self) -> None:
        self.calls = 0

    def note(self, y: Tensor) -> Any:
        self.calls += 1
        if self.calls % 100 == 0:
            print("calls:", self.calls)
        LOGGER.debug("call %d", self.calls)
        return 1


class LogsByKind(Layer):
    def begin(self) -> None:
        self.means: defaultdict[str, list[Tensor]] = defaultdict(list)

    def note(self, y: Tensor) -> Any:
        self.means["all"].append(y.mean())
        return 1


class TrimsItsHistory(Layer):
    def begin(self) -> None:
        self.history: list[Tensor] = []

    def note(self, y: Tensor) -> Any:
        self.history.append(y.mean())
        if len(self.history) > 3:
            self.history.pop(0)
        self.history = self.history[-2:]
        return 1


class NotesExtremes(Layer):
    def begin(self) -> None:
        self.largest = 0.0

    def note(self, y: Tensor) -> Any:
        self.largest = max(self.largest, float(y.max()))
        return 1


class LogsByAHook(Layer):
    def begin(self) -> None:
        self.layer.register_forward_hook(lambda module, inputs, output: SEEN.append(float(output.detach().mean())))


class GrowsATable(Layer):
    def begin(self) -> None:
        self.table = torch.ones(1)

    def note(self, y: Tensor) -> Any:
        if len(self.table) < len(y):
            self.table = torch.linspace(0.5, 1.5, len(y))
        return self.table[: len(y), None]


HARMLESS = [PrintsItsCalls, LogsByKind, TrimsItsHistory, NotesExtremes, LogsByAHook, GrowsATable]


class Traced(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=chance), torch.randn(8, WIDTH, generator=chance)


def model_of(*kinds: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for kind in kinds))


def traced(kind: Callable[[], nn.Module]) -> Traced:
    torch.manual_seed(0)
    return Traced(kind)


def plainly(model: nn.Module) -> Iterator[dict[str, Tensor | None]]:
    for step in range(3):
        model.zero_grad()
        for x, y in zip(*(each.chunk(4) for each in batch(step)), strict=True):
            torch.autograd.backward(functional.mse_loss(model(x), y) / 4)
        yield {name: param.grad for name, param in some(model.named_parameters())}


def steps(model: nn.Module, schedule: str, checkpoint: str) -> Iterator[dict[str, Tensor | None]]:
    more: dict[str, Any] = {"example": batch(0)[0]} if isinstance(model, Traced) else {}
    with piped(model, schedule, checkpoint, check_model=False, **more) as pipe:
        for step in range(3):
            pipe.zero_grad()
            x, y = batch(step)
            pipe.step(x, target=y)
            pipe.settle()
            yield {name: param.grad for name, param in pipe.named_parameters()}


@matrix("kind, form, schedule", HARMLESS, ("chain", "traced"), SCHEDULES)
def test_what_is_only_noted_or_made_once_is_no_matter(kind: type[Layer], form: str, schedule: tuple[str, str]) -> None:
    mine, other = (traced(kind) if form == "traced" else model_of(*4 * [kind]) for _ in range(2))
    for found, wanted in zip(steps(mine, *schedule), plainly(other), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Compiled(Layer):
    """Has a part that torch.compile made, which has no mode of its own."""

    def begin(self) -> None:
        self.layer = torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@mainly("form", "chain", "traced")
def test_parts_that_the_user_has_compiled_train_as_others(form: str) -> None:
    mine, other = (traced(Compiled) if form == "traced" else model_of(*4 * [Compiled]) for _ in range(2))
    for found, wanted in zip(steps(mine, "1f1b", "full"), plainly(other), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class BeginsByItsInput(Layer):
    """Scales by the first input it sees, as ActNorm does."""

    def begin(self) -> None:
        self.scale: Any = None

    def note(self, y: Tensor) -> Any:
        if self.scale is None:
            self.scale = 1 / (0.1 + y.std(0))
        return self.scale


class BeginsAndSaysSo(BeginsByItsInput):
    def begin(self) -> None:
        self.scale, self.has_begun = torch.ones(WIDTH), False

    def measured(self, y: Tensor) -> bool:
        """Take the scale from an input."""
        self.scale.copy_(1 / (0.1 + y.std(0)))
        return True

    def note(self, y: Tensor) -> Any:
        if not self.has_begun:
            self.has_begun = self.measured(y)
        return self.scale


class Numbers:
    """Two numbers."""

    def __init__(self) -> None:
        self.calls, self.other = 0, 1


class ReadsAllAtOnce(Layer):
    def begin(self) -> None:
        self.numbers = Numbers()

    def note(self, y: Tensor) -> Any:
        self.numbers.calls += 1
        return 1 + sum(vars(self.numbers).values()) % 3


class ReadsItsDict(Layer):
    def begin(self) -> None:
        self.calls = 0

    def note(self, y: Tensor) -> Any:
        self.calls += 1
        return 1 + sum(value for name, value in self.__dict__.items() if name.startswith("ca")) % 3


SEEMING = [
    (BeginsByItsInput, "scale"),
    (BeginsAndSaysSo, "scale"),
    (ReadsAllAtOnce, "numbers"),
    (ReadsItsDict, "calls"),
]


@pytest.mark.parametrize(("kind", "name"), SEEMING)
def test_two_copies_of_what_begins_by_its_input_or_is_read_without_its_name_are_refused(
    kind: type[Layer], name: str
) -> None:
    with refused(ModelError, f"block '0' changes its attribute '{name}'", fix="one copy of each stage"):
        list(steps(model_of(*4 * [kind]), "dualpipe", "none"))


class Writes(Layer):
    def note(self, y: Tensor) -> Any:
        LOG.append(float(y.mean()))
        return 1


class ReadsByAnotherName(Layer):
    def note(self, y: Tensor) -> Any:
        return 1 + NOTES[-1]


@pytest.mark.parametrize("schedule", some_of(SCHEDULES, [("1f1b", "none"), ("zb-v", "none")]))
def test_what_another_stage_reads_by_another_name_is_refused(schedule: tuple[str, str]) -> None:
    kinds = [Writes, Layer, Layer, ReadsByAnotherName]
    with refused(ModelError, "changes the global 'LOG' of block '0', which block '3' in another stage can read"):
        list(steps(model_of(*kinds), *schedule))


class Follows(Layer):
    """Keeps a mean in memory that others may see."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.mean = mean

    def note(self, y: Tensor) -> Any:
        self.mean.mul_(0.5).add_(y.mean(0))
        return 1 + self.mean.clone()


@pytest.mark.parametrize("schedule", some_of(SCHEDULES[:3], SCHEDULES[:1]))
def test_views_of_the_same_numbers_in_two_stages_are_refused_and_others_are_not(schedule: tuple[str, str]) -> None:
    same, apart = torch.zeros(4, WIDTH), [torch.zeros(4, WIDTH) for _ in range(2)]
    with refused(ModelError, "changes the attribute 'mean' of block '0', which block '1'.* in another stage"):
        list(steps(model_of(*(lambda: Follows(same[0]) for _ in range(4))), *schedule))
    mine, other = (model_of(*(lambda at=at, rows=rows: Follows(rows[at]) for at in range(4))) for rows in apart)
    for found, wanted in zip(steps(mine, *schedule), plainly(other), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def skipping() -> nn.Sequential:
    """Return blocks of which the last adds what the first returned, by hooks that share a list."""
    model, kept = model_of(*4 * [Layer]), list[Tensor]()
    model[0].register_forward_hook(lambda module, inputs, output: kept.append(output))
    model[3].register_forward_hook(lambda module, inputs, output: output + kept.pop(0))
    return model


@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_a_skip_by_hooks_is_refused_with_what_to_return(schedule: tuple[str, str]) -> None:
    with refused(
        ModelError, "block.* created but did not return", fix=r"return it from the block that creates it, as \(x"
    ):
        list(steps(skipping(), *schedule))
