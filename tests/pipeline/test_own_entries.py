"""A dict of which each stage uses entries of its own is plain training's; any other use of it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.launch.launch import launch
from drumline.core.errors import ModelError
from matrices import matrix
from refused import refused
from some import some
from state_pipes import piped

pytestmark = pytest.mark.torch
WIDTH = 4
STATE: dict[Any, Any] = {}
SCHEDULES = [("1f1b", "none"), ("zb-v", "none"), ("gpipe", "full")]


class Follows(nn.Module):
    """Follows a mean in its own entry."""

    name: Any = 0

    def __init__(self, name: Any) -> None:
        super().__init__()
        self.layer, self.name = nn.Linear(WIDTH, WIDTH), name

    def factor(self, x: Tensor) -> Any:
        STATE[self.name] = 0.5 * STATE.get(self.name, 0.0) + float(x.mean())
        return 1 + STATE[self.name]

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.layer(x))
        return y * self.factor(y.detach()) + x


class FollowsInPlace(Follows):
    """Follows it in a tensor."""

    def factor(self, x: Tensor) -> Any:
        if self.name not in STATE:
            STATE[self.name] = torch.zeros(WIDTH)
        STATE[self.name].mul_(0.5).add_(x.mean(0))
        return 1 + STATE[self.name].clone()


class Adds(Follows):
    """Adds up all entries."""

    def factor(self, x: Tensor) -> Any:
        STATE[self.name] = float(x.mean())
        return 1 + sum(STATE.values())


class ReadsAnother(Follows):
    def factor(self, x: Tensor) -> Any:
        return 1 + STATE.get(0, 0.0)


class Renames(Follows):
    """Has another name with every call."""

    def factor(self, x: Tensor) -> Any:
        self.name = 1 - self.name if self.name < 2 else self.name
        STATE[self.name] = 0.5 * STATE.get(self.name, 0.0) + float(x.mean())
        return 1 + STATE[self.name]


class Holds(Follows):
    """Has the dict in an attribute."""

    def __init__(self, name: Any) -> None:
        super().__init__(name)
        self.box = STATE

    def factor(self, x: Tensor) -> Any:
        self.box[self.name] = 0.5 * self.box.get(self.name, 0.0) + float(x.mean())
        return 1 + self.box[self.name]


class HoldsAround(Follows):
    """Has the dict in another one."""

    def __init__(self, name: Any) -> None:
        super().__init__(name)
        self.box = {"all": STATE}

    def factor(self, x: Tensor) -> Any:
        return 1 + self.box["all"].get(0, 0.0)


class Notes:
    """Has the same entry in each block, whatever this is called."""

    name = "all"

    def follow(self, mean: float) -> float:
        STATE[self.name] = 0.5 * STATE.get(self.name, 0.0) + mean
        return float(STATE[self.name])


class Asks(Follows):
    def __init__(self, name: Any) -> None:
        super().__init__(name)
        self.notes = Notes()

    def factor(self, x: Tensor) -> Any:
        return 1 + self.notes.follow(float(x.mean()))


OWN = [(Follows, "chain"), (Follows, "traced"), (FollowsInPlace, "chain"), (FollowsInPlace, "traced"), (Holds, "chain")]


@pytest.fixture(autouse=True)
def nothing_is_kept() -> None:
    STATE.clear()


class Traced(nn.Module):
    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def model_of(form: str, *kinds: type[Follows]) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(kind(at) for at, kind in enumerate(kinds)))
    return Traced(blocks) if form == "traced" else blocks


def batch(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=chance), torch.randn(8, WIDTH, generator=chance)


def plainly(model: nn.Module) -> Iterator[dict[str, Tensor | None]]:
    for step in range(3):
        model.zero_grad()
        for x, y in zip(*(each.chunk(4) for each in batch(step)), strict=True):
            torch.autograd.backward(functional.mse_loss(model(x), y) / 4)
        yield {name: param.grad for name, param in some(model.named_parameters())}


def stepped(model: nn.Module, *settings: Any, **more: Any) -> Iterator[dict[str, Tensor | None]]:
    if isinstance(model, Traced):
        more["example"] = batch(0)[0]
    with piped(model, *settings, **more) as pipe:
        for step in range(3):
            pipe.zero_grad()
            pipe.step(batch(step)[0], target=batch(step)[1])
            pipe.settle()
            yield {name: param.grad for name, param in pipe.named_parameters()}


@matrix("case, schedule", OWN, SCHEDULES)
def test_entries_of_their_own_are_plain_trainings(case: tuple[type[Follows], str], schedule: tuple[str, str]) -> None:
    kind, form = case
    wanted = list(plainly(model_of(form, *4 * [kind])))
    state = {key: torch.as_tensor(value).tolist() for key, value in STATE.items()}
    STATE.clear()
    found = list(stepped(model_of(form, *4 * [kind]), *schedule))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close({key: torch.as_tensor(value).tolist() for key, value in STATE.items()}, state)


def on_a_rank() -> list[dict[str, Tensor | None]]:
    STATE.clear()  # it may have come along, with what the plain loop left
    return list(stepped(model_of("chain", *4 * [Follows]), "1f1b", transport="shared-memory"))


def test_so_it_is_between_processes() -> None:
    wanted = list(plainly(model_of("chain", *4 * [Follows])))
    for found in launch(on_a_rank, num_ranks=2, timeout=120):
        for step, own in zip(some(found), wanted, strict=True):
            torch.testing.assert_close(step, {name: own[name] for name in some(step)}, rtol=1e-5, atol=1e-6)


OTHERS = [
    [Adds, Adds, Adds, Adds],
    [Asks, Asks, Asks, Asks],
    [Follows, Follows, Follows, ReadsAnother],
    [Renames, Follows, Follows, Renames],
    [Follows, Follows, Follows, HoldsAround],
]


@pytest.mark.parametrize("kinds", OTHERS)
def test_other_uses_of_a_dict_are_refused(kinds: list[type[Follows]]) -> None:
    with refused(ModelError, "a forward changes the (global 'STATE'|attribute).* of block '.', which block"):
        list(stepped(model_of("chain", *kinds), "1f1b", check_model=False))


def test_blocks_that_are_called_otherwise_later_are_looked_at_again() -> None:
    model = model_of("chain", *4 * [Follows])
    steps = stepped(model, "1f1b", check_model=False)
    next(steps)
    for block in some(model.children()):
        vars(block)["name"] = 0
    with refused(ModelError, "a forward changes the global 'STATE' of block '.', which block"):
        next(steps)


def test_one_object_in_two_entries_is_refused() -> None:
    STATE.update(dict.fromkeys(range(4), torch.zeros(WIDTH)))
    with refused(ModelError, "a forward changes the global 'STATE' of block '.', which block"):
        list(stepped(model_of("chain", *4 * [FollowsInPlace]), "1f1b", check_model=False))


def test_copies_of_a_stage_are_refused_with_their_own_entries() -> None:
    with refused(ModelError, "block '.' changes the global 'STATE' in its forward", expected="two copies"):
        list(stepped(model_of("chain", *4 * [Follows]), "dualpipe", check_model=False))
