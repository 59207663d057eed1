"""State that blocks keep outside of their attributes, share, or use up: plain training's, or one refusal by name."""

from __future__ import annotations

import contextvars
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.profile.blocks import profile
from fuzz_state import Outcome, fuzz, table
from matrices import ALL, examples
from refused import refused
from some import some
from state_cases import PLACES, SCHEDULES, VALUES, Case, drawn, source
from state_pipes import piped

pytestmark = pytest.mark.torch
WIDTH = 4
CALLS = 0
NOISE = torch.Generator().manual_seed(0)
MEANS: dict[str, float] = {}
TURN: contextvars.ContextVar[int] = contextvars.ContextVar("TURN")


class Layer(nn.Module):
    """Scales its output by something."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def scale(self, x: Tensor) -> Any:
        """Return a factor, and change what is kept."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.layer(x)) * self.scale(x.detach())


class CountsInAGlobal(Layer):
    def scale(self, x: Tensor) -> Any:
        global CALLS
        CALLS += 1
        return 1 + CALLS % 3


class DrawsFromAGlobal(Layer):
    def scale(self, x: Tensor) -> Any:
        return torch.rand(WIDTH, generator=NOISE)


class NotesInAGlobal(Layer):
    def scale(self, x: Tensor) -> Any:
        MEANS["mean"] = 0.5 * MEANS.get("mean", 0.0) + float(x.mean())
        return 1 + MEANS["mean"]


class CountsInAVariable(Layer):
    def scale(self, x: Tensor) -> Any:
        TURN.set(TURN.get(0) + 1)
        return 1 + TURN.get() % 3


class Plain(Layer):
    def scale(self, x: Tensor) -> Any:
        return 1


def begin() -> None:
    """Let what is outside be as it was at first."""
    global CALLS
    CALLS = 0
    NOISE.manual_seed(0)
    MEANS.clear()
    TURN.set(0)


def batch(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=chance), torch.randn(8, WIDTH, generator=chance)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in some(model.parameters()) if param.grad is not None]


def plainly(model: nn.Module, num_steps: int = 3) -> list[list[Tensor]]:
    found = []
    for step in range(num_steps):
        model.zero_grad()
        inputs, targets = batch(step)
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (functional.mse_loss(model(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        found.append(gradients_of(model))
    return found


def model_of(*kinds: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for kind in kinds))


OUTSIDE = [CountsInAGlobal, DrawsFromAGlobal, NotesInAGlobal, CountsInAVariable]


@pytest.mark.parametrize("kind", OUTSIDE)
@pytest.mark.parametrize(("schedule", "checkpoint"), [("gpipe", "full"), ("zb-h1", "none")])
def test_a_stage_alone_with_state_outside_keeps_it_as_plain_training_does(
    kind: type[Layer], schedule: str, checkpoint: str
) -> None:
    kinds = [kind, kind, Plain, Plain]
    begin()
    wanted = plainly(model_of(*kinds))
    state = CALLS, NOISE.get_state().tolist(), dict(MEANS), TURN.get()
    begin()
    model, found = model_of(*kinds), []
    pipe = piped(model, schedule, checkpoint=checkpoint)
    for step in range(3):
        model.zero_grad()
        x, y = batch(step)
        pipe.step(x, target=y)
        found.append(gradients_of(model))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert (CALLS, NOISE.get_state().tolist(), dict(MEANS), TURN.get()) == state


NAMES = ["global 'CALLS'", "global 'NOISE'", "global 'MEANS'", "context variable 'TURN'"]
NAMED = list(zip(OUTSIDE, NAMES, strict=True))


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_two_stages_that_change_one_thing_are_refused(kind: type[Layer], name: str) -> None:
    begin()
    pipe = piped(model_of(kind, Plain, Plain, kind), "1f1b", check_model=False)
    words = f"a forward changes the {name} of block '[03]', which block '[03]' in another stage can read"
    with refused(ModelError, words, expected="belong to one stage", fix="into one stage"):
        pipe.step(batch(0)[0], target=batch(0)[1])


@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_two_copies_of_a_stage_are_refused(kind: type[Layer], name: str) -> None:
    begin()
    pipe = piped(model_of(kind, Plain), "dualpipe", check_model=False)
    with refused(ModelError, f"block '0' changes the {name} in its forward", expected="two copies", fix="zb-v"):
        pipe.step(batch(0)[0], target=batch(0)[1])


class Reads(Layer):
    def scale(self, x: Tensor) -> Any:
        return 1 + MEANS.get("mean", 0.0)


class ReadsFirst(Layer):
    """Reads what a later block has left."""

    def scale(self, x: Tensor) -> Any:
        return 1 + CALLS


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((NotesInAGlobal, Plain, Plain, Reads), "global 'MEANS' of block '0', which block '3' in another stage"),
        ((ReadsFirst, Plain, Plain, CountsInAGlobal), "global 'CALLS' of block '3', which block '0' in another stage"),
    ],
)
def test_a_stage_that_reads_what_another_keeps_is_refused(kinds: tuple[type[Layer], ...], words: str) -> None:
    begin()
    pipe = piped(model_of(*kinds), "1f1b", check_model=False)
    with refused(ModelError, words):
        pipe.step(batch(0)[0], target=batch(0)[1])


class Shares(Layer):
    """Has a generator that its maker gives to other blocks as well."""

    def __init__(self, noise: torch.Generator) -> None:
        super().__init__()
        self.noise = noise

    def scale(self, x: Tensor) -> Any:
        return torch.rand(WIDTH, generator=self.noise)


def test_one_generator_for_blocks_of_two_stages_is_refused() -> None:
    noise = torch.Generator().manual_seed(1)
    model = model_of(lambda: Shares(noise), lambda: Shares(noise))
    pipe = piped(model, "zb-h1", check_model=False)
    with refused(ModelError, "attribute 'noise' of block '[01]'", fix="put all blocks that use it into one stage"):
        pipe.step(batch(0)[0], target=batch(0)[1])


TABLES: dict[int, Tensor] = {}
NUM_CALLS = 0
SEEN: list[float] = []
LATEST: Any = None


@functools.cache
def cached(length: int) -> Tensor:
    return torch.linspace(0.5, 1.5, length)


class Harmless(Layer):
    """Keeps what makes no difference, in many ways."""

    longest = 0

    def scale(self, x: Tensor) -> Any:
        global NUM_CALLS, LATEST
        NUM_CALLS += 1
        SEEN.append(float(x.mean()))
        LATEST = x.mean(0)
        self.attention = x
        self.rows = len(x)
        if WIDTH not in TABLES:
            TABLES[WIDTH] = cached(WIDTH) * 2
        if x.shape[-1] > type(self).longest:
            type(self).longest = x.shape[-1]
            self.grown = torch.ones(x.shape[-1])
        return TABLES[WIDTH] + self.grown_here() + LATEST + 1 / self.rows

    def grown_here(self) -> Tensor:
        """Return a table that is made when it is first needed."""
        if getattr(self, "ramp", None) is None:
            self.ramp = torch.linspace(0, 1, WIDTH)
        return self.ramp


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe", "chimera"])
def test_what_makes_no_difference_may_be_kept_anywhere(schedule: str) -> None:
    wanted = plainly(model_of(*[Harmless] * 4))
    TABLES.clear()
    Harmless.longest = 0
    model, found = model_of(*[Harmless] * 4), []
    pipe = piped(model, schedule)
    for step in range(3):
        model.zero_grad()
        x, y = batch(step)
        pipe.step(x, target=y)
        found.append(gradients_of(model))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


class Takes(Layer):
    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values

    def scale(self, x: Tensor) -> Any:
        return 1 + next(self.values)


def numbers() -> Iterator[float]:
    yield from [0.5, 1.0, 1.5] * 100


ITERATORS: dict[str, Callable[[], Any]] = {
    "a list's": lambda: iter([0.5, 1.0, 1.5] * 100),
    "a generator": numbers,
    "a cycle": lambda: itertools.cycle([0.5, 1.0, 1.5]),
    "a loader's": lambda: iter(torch.utils.data.DataLoader(torch.tensor([0.5, 1.0, 1.5] * 100))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", ITERATORS)
def test_checks_and_measuring_take_nothing_from_iterators(name: str) -> None:
    make = ITERATORS[name]
    wanted = plainly(model_of(Plain, lambda: Takes(make())), 4)
    model, found = model_of(Plain, lambda: Takes(make())), []
    profile(model, batch(0)[0], num_runs=2)
    pipe = piped(model, "1f1b")
    for step in range(4):  # the third is checked, too
        model.zero_grad()
        x, y = batch(step)
        pipe.step(x, target=y)
        found.append(gradients_of(model))
    assert pipe.checked is not None
    assert (pipe.checked.step, pipe.checked.unchecked) == (2, "")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_a_block_that_no_rank_can_copy_is_refused_by_its_attribute() -> None:
    model = model_of(Plain, lambda: Takes(numbers()))
    with refused(ModelError, "attribute 'values' of block '1' cannot be copied", fix="zb-v"):
        piped(model, "dualpipe")


class Follows(Layer):
    """Averages a teacher that is no module of its own, and counts in an object by a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]
        self.notes = Notes()
        self.by = weakref.ref(self.notes)
        self.space = types.SimpleNamespace(calls=0)

    def scale(self, x: Tensor) -> Any:
        notes = self.by()
        assert notes is not None
        notes.calls += 1
        self.space.calls += 2
        with torch.no_grad():
            for mine, theirs in zip(self.teachers[0].parameters(), self.layer.parameters(), strict=True):
                mine.mul_(0.5).add_(theirs, alpha=0.5)
            return self.teachers[0](x) + notes.calls % 3 + self.space.calls % 5


class Notes:
    calls = 0


def test_modules_in_lists_and_what_weak_references_reach_are_put_back() -> None:
    wanted = plainly(model_of(Follows, Plain))
    model, found = model_of(Follows, Plain), []
    pipe = piped(model, "gpipe", checkpoint="full")
    for step in range(3):
        model.zero_grad()
        x, y = batch(step)
        pipe.step(x, target=y)
        found.append(gradients_of(model))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


CASES = [drawn(0, number, "chain") for number in range(examples(60))]


def test_random_state_in_random_places_is_plain_trainings_or_refused() -> None:
    outcome = fuzz(CASES)
    assert outcome.is_clean, outcome.failures
    # Cases that are all refused, or all equal, would prove nothing.
    assert outcome.counts["equal"] > len(CASES) // 4
    assert outcome.counts["refused"] > len(CASES) // 10
    assert "recomputed" in table(outcome)


def test_cases_have_every_value_place_and_schedule() -> None:
    cases = [drawn(0, number) for number in range(1000)]
    assert {case.value for case in cases} == set(VALUES)
    assert {case.place for case in cases} == set(PLACES)
    assert {(case.schedule, case.checkpoint) for case in cases} == set(SCHEDULES)
    assert {case.form for case in cases} == {"chain", "traced"}
    assert len({source(case) for case in cases}) > 900


def test_a_wrong_case_fails() -> None:
    outcome = Outcome(0)
    case: Case = CASES[0]
    outcome.add(case, "wrong", "gradients of step 0 are 0.5 of their size off")
    assert not outcome.is_clean
    assert f"case {case.number} wrong" in outcome.failures[0]
    assert ALL or len(CASES) < 60
