"""Lists of blocks are checked and watched like any other model: right, or refused before an optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import chain_tricks
from chain_tricks import RIGHT, TRICKS, WIDTH, Step, row
from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, ModelError
from drumline.pipeline.pipeline import Pipeline
from refused import refused
from some import some
from tally import Tally

pytestmark = [pytest.mark.torch, pytest.mark.features("check")]
MICROBATCHES = 4


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Empty what models keep outside of themselves."""
    yield
    chain_tricks.MEMORY.clear()
    chain_tricks.SKIPS.clear()


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def made(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def pipeline(model: Any, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": MICROBATCHES, "num_ranks": 2}
    return Pipeline(model, **{**given, "device": "cpu", "transport": "in-process", "balance": "even", **settings})


def plain(model: Any, steps: int = 1) -> list[dict[str, Tensor]]:
    """Return the gradients of every step by a plain loop over microbatches."""
    blocks = list(model.values() if isinstance(model, dict) else model)
    whole = model if isinstance(model, nn.Sequential) else nn.Sequential(*blocks)
    named = {
        f"{name}.{key}": param
        for name, block in zip(model if isinstance(model, dict) else map(str, range(len(blocks))), blocks, strict=True)
        for key, param in block.named_parameters()
    }
    found = []
    for step in range(steps):
        whole.zero_grad()
        for x, y in zip(*(tensor.chunk(MICROBATCHES) for tensor in data(step)), strict=True):
            torch.autograd.backward(functional.mse_loss(whole(x), y) / MICROBATCHES)
        found.append({name: value.grad.clone() for name, value in named.items() if value.grad is not None})
    return found


def stepped(pipe: Pipeline, step: int = 0) -> dict[str, Tensor]:
    pipe.zero_grad()
    x, y = data(step)
    pipe.step(x, target=y)
    return {name: param.grad.clone() for name, param in pipe.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_refused_before_an_optimizer_steps(name: str, schedule: str) -> None:
    pipe = pipeline(made(TRICKS[name]), schedule=schedule)
    before = {name: param.detach().clone() for name, param in pipe.named_parameters()}
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ModelError):
        stepped(pipe)
    with pytest.raises(ModelError):
        optimizer.step()
    assert all(torch.equal(param, before[name]) for name, param in some(pipe.named_parameters()))


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes_with_the_gradients_of_a_plain_loop(name: str) -> None:
    wanted = plain(made(RIGHT[name]), steps=3)
    pipe = pipeline(made(RIGHT[name]), check_model=1)
    for step, gradients in some(enumerate(wanted)):
        found = stepped(pipe, step)
        assert pipe.checked is not None
        assert (pipe.checked.wrong, pipe.checked.unchecked, pipe.checked.step) == ((), "", step)
        if name != "dropout":  # of which every pipeline seeds its own
            for key, tensor in some(found.items()):
                torch.testing.assert_close(tensor, gradients[key], msg=f"{key} in step {step}")


@pytest.mark.parametrize("schedule", ["dualpipe", "chimera"])
def test_of_two_copies_each_is_checked(schedule: str) -> None:
    """The second copy of a stage runs a microbatch of its own, and a fault of it alone is found."""
    pipe = pipeline(made(RIGHT["plain"]), schedule=schedule)
    stepped(pipe)
    assert pipe.checked is not None
    assert (pipe.checked.num_microbatches, pipe.checked.wrong) == (2, ())
    spoiled = pipeline(made(RIGHT["plain"]), schedule=schedule)
    second = [executor for executor in spoiled._engine.executors if 0 in executor.stages][-1]
    module: Any = second.stages[0].blocks[0].module
    assert module is not next(item for item in spoiled._engine.executors if 0 in item.stages).stages[0].blocks[0].module
    module.after = lambda x: x * 1.01
    with refused(ModelError, "returns something else than by itself"):
        stepped(spoiled)


@pytest.mark.parametrize(
    ("schedule", "first", "last"), [("dualpipe", 2, 4), ("dualpipe", 3, 5), ("chimera", 0, 6), ("chimera", 1, 7)]
)
def test_microbatches_that_overtake_each_other_are_looked_at(schedule: str, first: int, last: int) -> None:
    """A queue between two blocks hands on another microbatch's value only where directions cross."""
    queue: list[Tensor] = []
    steps = [Step() for _ in range(8)]
    steps[first] = Step(after=lambda x: queue.append(x.detach()) or x)  # type: ignore[func-returns-value]
    steps[last] = Step(before=lambda x: x + queue.pop(0))
    pipe = pipeline(nn.Sequential(*steps), schedule=schedule, num_ranks=4, num_microbatches=8)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    with refused(ModelError, "returns something else than by itself"):
        pipe.step(x, target=x.flip(0))


def test_recomputation_is_on_where_it_will_be() -> None:
    """A block that is another each time it runs is right until it is recomputed."""
    for name in ("a generator", "a counter in a closure"):  # found and put back
        stepped(pipeline(made(RIGHT[name]), checkpoint="full"))
    calls = Tally()

    def make() -> nn.Sequential:
        return row(Step(after=lambda x: x * (1 + calls() % 5)), Step(), Step(), Step())

    with refused(ModelError, "the model, run block by block, returns something else than by itself"):
        stepped(pipeline(made(make), checkpoint="full"))


def test_the_second_microbatch_is_compared_too() -> None:
    calls = Tally()

    class Second(Step):
        def forward(self, x: Tensor) -> Any:
            made: Tensor = super().forward(x)
            return made * 1.01 if calls() == 3 else made  # the step's second microbatch, behind two by itself

    with refused(ModelError, "returns something else than by itself"):
        stepped(pipeline(row(Step(), Second(), Step(), Step()), schedule="gpipe"))


def appended(model: Any) -> None:
    model.append(Step())


def exchanged(model: Any) -> None:
    model[1] = Step()


def removed(model: Any) -> None:
    del model[3]


def given_a_forward(model: Any) -> None:
    model.forward = lambda x: x


def given_a_class(model: Any) -> None:
    model.__class__ = chain_tricks.Called


@pytest.mark.parametrize("kind", ["plain", "a list", "a module list"])
@pytest.mark.parametrize("change", [appended, exchanged, removed])
def test_blocks_that_change_after_the_start_are_refused(change: Any, kind: str) -> None:
    model = made(RIGHT[kind])
    pipe = pipeline(model)
    stepped(pipe)
    change(model)
    with refused(ModelError, "replaced, added or removed after the pipeline was created", fix="new pipeline"):
        stepped(pipe)


@pytest.mark.parametrize("change", [given_a_forward, given_a_class])
def test_what_the_whole_does_is_watched(change: Any) -> None:
    model = made(RIGHT["plain"])
    pipe = pipeline(model)
    stepped(pipe)
    change(model)
    with refused(ModelError, "exchanged after the pipeline was created, and no stage would run it"):
        stepped(pipe)


def test_a_hook_on_all_modules_makes_the_next_step_be_checked() -> None:
    pipe = pipeline(made(RIGHT["plain"]))
    stepped(pipe)
    handle = nn.modules.module.register_module_forward_hook(  # the whole model's output too, which no stage runs
        lambda module, given, output: output * 2 if isinstance(module, nn.Sequential) else None
    )
    try:
        with refused(ModelError, "returns something else than by itself in step 1"):
            stepped(pipe)
    finally:
        handle.remove()


def test_the_parameters_of_a_loss_are_compared_and_left_alone() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Any:
            return (self.scale * (output - target)).square().mean()

    torch.manual_seed(0)
    pipe, unchecked = (pipeline(made(RIGHT["plain"]), loss_fn=Loss(), check_model=flag) for flag in (True, False))
    found, wanted = stepped(pipe), stepped(unchecked)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in some(found.items()))
    assert pipe.checked is not None
    assert pipe.checked.num_parameters == 9


def test_what_a_loss_keeps_is_put_back() -> None:
    """A loss that scales by what it has seen, in a module, a closure or an object, goes on as without a check."""

    class Seen(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Any:
            loss = functional.mse_loss(output, target)
            scaled = loss / self.mean.clone()
            self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
            return scaled

    class Called:
        def __init__(self) -> None:
            self.calls = 1

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return functional.mse_loss(output, target) / self.calls

    def closure() -> Any:
        calls = [1]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            calls[0] += 1
            return functional.mse_loss(output, target) / calls[0]

        return loss

    for make in (Seen, Called, closure):
        found = [stepped(pipeline(made(RIGHT["plain"]), loss_fn=make(), check_model=flag)) for flag in (True, False)]
        assert all(torch.equal(tensor, found[1][name]) for name, tensor in some(found[0].items())), make


def test_what_blocks_keep_past_a_process_is_found_on_ranks_of_their_own() -> None:
    for of_a_library, of_a_closure in some(launch(_past_the_process, num_ranks=2, timeout=120)):
        assert "the model, run block by block, returns something else than by itself" in of_a_library
        assert "the variable 'memory' of a closure of block '0', which block '3' in another stage" in of_a_closure


def _past_the_process() -> list[str]:
    memory: dict[str, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        memory["skip"] = x.detach()
        return x

    def keep_in_a_library(x: Tensor) -> Tensor:
        vars(functional)["skip"] = x.detach()
        return x

    torch.manual_seed(0)
    steps = (
        (Step(after=keep_in_a_library), Step(before=lambda x: x + vars(functional).get("skip", 0.0))),
        (Step(after=keep), Step(before=lambda x: x + memory.get("skip", 0.0))),
    )
    errors = []
    for first, last in steps:
        pipe = pipeline(row(first, Step(), Step(), last), num_ranks=None, transport="auto", timeout=60)
        try:
            stepped(pipe)
        except DrumlineError as error:
            errors.append(str(error))
    return errors


def test_a_microbatch_that_turns_out_to_count_nothing_is_not_compared() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        mask = (target != 0).float()
        loss: Tensor = ((output - target).square() * mask).sum() / mask.sum()
        return loss

    x, y = data()
    y[2:4] = 0.0  # the second microbatch
    pipe = pipeline(made(RIGHT["plain"]), loss_fn=loss_fn)
    pipe.step(x, target=y)
    assert pipe.checked is not None
    assert (pipe.checked.num_parameters, pipe.checked.wrong, pipe.checked.unchecked) == (8, (), "")


class Breaks(Step):
    """Cannot be called at one time, as the user's own code may not."""

    def __init__(self, at: Callable[[int], bool]) -> None:
        super().__init__()
        self.at, self.calls = at, Tally()

    def forward(self, x: Tensor) -> Any:
        if self.at(self.calls()):
            raise KeyError("no such layer")
        return super().forward(x)


def test_an_error_of_a_block_comes_from_the_step_as_it_is() -> None:
    pipe = pipeline(row(Step(), Step(), Breaks(lambda call: True), Step()))
    with pytest.raises(KeyError, match="no such layer") as raised:
        stepped(pipe)
    assert any(item.name == "run" and "executor" in str(item.path) for item in raised.traceback), "the step raises it"
    assert pipe.checked is None


def test_a_model_that_fails_by_itself_alone_is_refused() -> None:
    pipe = pipeline(row(Step(), Step(), Breaks(lambda call: call == 0), Step()))
    with refused(ModelError, "by itself cannot run a microbatch that its blocks can: it raises KeyError"):
        stepped(pipe)


class Adds(Step):
    """Adds to a gradient of its own, in its forward or in a hook, before or after autograd does."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def add(self) -> None:
        weight, more = self.layer.weight, torch.full((WIDTH, WIDTH), 0.5)
        weight.grad = more if weight.grad is None else weight.grad + more

    def forward(self, x: Tensor) -> Any:
        if self.where == "forward":
            self.add()
        x = x * 1.0
        made = super().forward(x)
        if self.where == "late":
            x.register_hook(lambda gradient: self.add())  # type: ignore[no-untyped-call]
        elif self.where == "backward":
            torch.autograd.backward(made.square().sum(), retain_graph=True)
        elif self.where == "hook":
            made.register_hook(lambda gradient: self.add())
        return made


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("where", ["forward", "backward", "hook"])
def test_gradients_that_a_block_adds_itself_are_compared(where: str, schedule: str) -> None:
    def make() -> nn.Sequential:
        return row(Step(), Step(), Adds(where), Step())

    wanted = plain(made(make), steps=2)
    pipe = pipeline(made(make), schedule=schedule, check_model=1)
    for step, gradients in some(enumerate(wanted)):
        found = stepped(pipe, step)
        assert pipe.checked is not None
        assert (pipe.checked.wrong, pipe.checked.unchecked, pipe.checked.num_parameters) == ((), "", 8)
        for key, tensor in some(found.items()):
            torch.testing.assert_close(tensor, gradients[key], msg=f"{key} in step {step}")


def test_a_gradient_that_is_changed_once_it_was_seen_is_told() -> None:
    def make() -> nn.Sequential:
        return row(Step(), Step(), Adds("late"), Step())

    (wanted,) = plain(made(make))
    pipe = pipeline(made(make))
    found = stepped(pipe)
    assert pipe.checked is not None
    assert "not the gradient of 2.layer.weight, to which a hook adds once autograd has" in pipe.checked.unchecked
    for key, tensor in some(found.items()):
        torch.testing.assert_close(tensor, wanted[key], msg=key)
