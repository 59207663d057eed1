"""What is replaced in torch while a forward is watched: no more than is needed, and put back whatever else goes on."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.engine.updates.guard import Guard
from drumline.model.blocks.pieces import pieces_of
from drumline.model.follow.inputs import Inputs
from drumline.model.follow.skeleton import copied
from drumline.model.patches import Patch, Replacement
from drumline.model.randomness import Randomness
from drumline.pipeline.pipeline import Pipeline
from refused import refused
from some import some
from torch_models import data

pytestmark = pytest.mark.torch
ATTRIBUTES: list[tuple[Any, str]] = [
    (torch.autograd.Variable, "_execution_engine"),
    (Tensor, "register_hook"),
    (nn.Module, "__call__"),
    (nn.Module, "__getattribute__"),
    (nn.Module, "__setattr__"),
    (nn.Module, "__delattr__"),
    (torch.autograd.Function, "apply"),
    (torch, "_check_tensor_all_with"),
]


def attributes() -> list[Any]:
    return [vars(owner).get(name) for owner, name in ATTRIBUTES]


class Looks(nn.Module):
    """Notes what stands in the places of torch while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seen: list[list[Any]] = []

    def forward(self, x: Any) -> Any:
        x, *rest = x if isinstance(x, tuple) else (x,)
        self.seen.append(attributes())
        return self.layer(x), *rest, x


class First(nn.Module):
    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        return x[0] + x[-1]


def looking(schedule: str) -> tuple[Pipeline, list[Looks]]:
    looks = [Looks(), Looks(), Looks()]
    model = nn.Sequential(looks[0], looks[1], looks[2], First())
    return Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, num_microbatches=2, num_ranks=2), looks


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b"])
def test_an_unsplit_forward_replaces_nothing_of_torchs(schedule: str) -> None:
    pipe, looks = looking(schedule)
    batch, target = data(4)
    pipe.step(batch, target=target)
    pipe.eval_step(batch)
    for look in some(looks):
        assert len(look.seen) >= 4
        assert look.seen == [attributes()] * len(look.seen)


def test_a_recorded_forward_puts_back_what_it_found() -> None:
    pipe, looks = looking("zb-h1")
    batch, target = data(4)
    before = attributes()
    pipe.step(batch, target=target)
    assert any(seen[0] is not before[0] and seen[1] is not before[1] for look in looks for seen in look.seen)
    assert attributes() == before


class Counting:
    """A user's own stand-in for autograd's engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.engine.run_backward(*args, **kwargs)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Penalty(nn.Module):
    """Takes a gradient inside its forward, which makes a recorded forward begin again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x * 1.0 if x.requires_grad else x.detach().requires_grad_()
            made = torch.sin(self.layer(x))
            (steep,) = torch.autograd.grad(made.pow(2).sum(), x, create_graph=True)
        return made + steep.pow(2).mean(-1, keepdim=True)


def stepped(schedule: str, seed: int = 0, middle: Callable[[], nn.Module] = Penalty) -> list[Tensor]:
    """Return the gradients of two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), middle(), nn.Linear(6, 6), middle())
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, num_microbatches=4, num_ranks=2)
    for step in range(2):
        batch, target = data(8, seed=step)
        pipe.step(batch, target=target)
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_users_own_engine_is_called_and_is_there_afterwards(schedule: str) -> None:
    expected = stepped(schedule)
    counting = Counting(torch.autograd.Variable._execution_engine)
    with replaced(torch.autograd.Variable, "_execution_engine", counting):
        found = stepped(schedule)
        assert attributes()[0] is counting
    assert counting.calls > 0
    assert all(some(torch.equal(tensor, other) for tensor, other in zip(found, expected, strict=True)))


class Patches(nn.Module):
    """Puts a stand-in of its own over the engine in its first forward, and leaves it there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.own: Counting | None = None

    def forward(self, x: Tensor) -> Any:
        if self.own is None:
            self.own = Counting(torch.autograd.Variable._execution_engine)
            torch.autograd.Variable._execution_engine = self.own  # type: ignore[assignment]
        return self.layer(x)


def test_a_stand_in_that_a_forward_puts_over_ours_stays_and_works() -> None:
    before = torch.autograd.Variable._execution_engine
    block = Patches()
    try:
        model = nn.Sequential(nn.Linear(6, 6), block)
        pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", num_microbatches=2, num_ranks=2)
        batch, target = data(4)
        for _ in range(2):
            pipe.step(batch, target=target)
            assert attributes()[0] is block.own
        torch.autograd.backward(torch.ones(1, requires_grad=True) * 2)
        assert block.own is not None
        assert block.own.calls == 1
    finally:
        torch.autograd.Variable._execution_engine = before


def test_a_pipeline_inside_of_a_recorded_forward_leaves_it_recorded() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.penalty = Penalty()

        def forward(self, x: Tensor) -> Any:
            stepped("zb-h1", middle=lambda: nn.Linear(6, 6))
            return self.penalty(x)

    before = attributes()
    found, expected = stepped("zb-h1", middle=Inner), stepped("zb-h1")
    assert attributes() == before
    assert all(some(torch.equal(tensor, other) for tensor, other in zip(found, expected, strict=True)))


def test_watchers_of_two_threads_end_in_any_order() -> None:
    class Torch:
        def call(self) -> list[str]:
            return ["torch"]

    def make(now: Replacement) -> Any:
        return lambda self: [*filter(None, [now.watcher]), *now.original(self)]

    patch, own = Patch(Torch, "call", make), vars(Torch)["call"]
    inside, leave, said = threading.Event(), threading.Event(), list[list[str]]()

    def other() -> None:
        with patch.by("other"):
            inside.set()
            leave.wait(10)
            said.append(Torch().call())
        said.append(Torch().call())

    thread = threading.Thread(target=other)
    with patch.by("first"):
        thread.start()
        inside.wait(10)
        assert Torch().call() == ["first", "torch"]
        with patch.by("nested"):
            assert Torch().call() == ["nested", "torch"]
    assert Torch().call() == ["torch"]  # the other thread still watches, and nobody watches this one
    assert vars(Torch)["call"] is not own
    leave.set()
    thread.join()
    assert said == [["other", "torch"], ["torch"]]
    assert vars(Torch)["call"] is own


class Meets(nn.Module):
    """Waits before and after its layer until the other pipeline is amid a forward, too, once it has a barrier."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.barrier = inner, threading.Barrier(1)

    def forward(self, x: Tensor) -> Any:
        self.barrier.wait()
        made = self.inner(x)
        self.barrier.wait()
        return made


@pytest.mark.parametrize("other", [("zb-h1", lambda: nn.Linear(6, 6)), ("1f1b", Penalty)])
def test_two_pipelines_in_threads_do_not_see_each_other(other: tuple[str, Any]) -> None:
    """Both stand amid a forward at once: one is recorded, the other too, or it takes gradients itself."""
    before, barrier, first = attributes(), threading.Barrier(2, timeout=20), threading.Lock()
    batch, target = data(2)
    errors: list[BaseException] = []

    def run(schedule: str, reference: nn.Sequential) -> None:
        meets = Meets(reference[1])
        model = nn.Sequential(reference[0], meets)
        try:
            pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, num_microbatches=1, num_ranks=1)
            with (
                first
            ):  # a check seeds blocks that might draw, and a forward during which a generator moves is run twice
                pipe.step(batch, target=target)
            barrier.wait()
            pipe.zero_grad()
            meets.barrier = barrier
            pipe.step(batch, target=target)
            found = [param.grad for param in reference.parameters()]
            reference.zero_grad()
            torch.autograd.backward(functional.mse_loss(reference(batch), target))
            for param, gradient in zip(reference.parameters(), found, strict=True):
                torch.testing.assert_close(param.grad, gradient)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    # Made here: threads have one random generator between them, and a forward during which it moves is run twice.
    references = [nn.Sequential(nn.Linear(6, 6), inner) for inner in (nn.Linear(6, 6), other[1]())]
    pairs = zip(("zb-h1", other[0]), references, strict=True)
    threads = [threading.Thread(target=run, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert attributes() == before


@pytest.mark.features("check")
def test_plain_layers_are_compared_while_another_thread_checks_its_own() -> None:
    found: dict[int, Any] = {}
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]
    batch, target = data(4)

    def run(at: int) -> None:
        pipe = Pipeline(models[at], loss_fn=functional.mse_loss, num_microbatches=2, num_ranks=1, check_model=1)
        found[at] = []
        for step in range(6):
            pipe.step(batch, target=target)
            assert pipe.checked is not None
            found[at].append((pipe.checked.step == step, pipe.checked.wrong, pipe.checked.unchecked))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [(True, (), "")] * 6, 1: [(True, (), "")] * 6}


SEEDS = itertools.count()


class Disturbed(nn.Module):
    """A layer during which another thread seeds the generators that all threads share."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(6, 6), dropout

    def forward(self, x: Tensor) -> Any:
        made = self.layer(x)
        other = Randomness(next(SEEDS), torch.device("cpu"))
        thread = threading.Thread(target=other.apply, args=(0, "a block of another pipeline"))
        thread.start()
        thread.join()
        return functional.dropout(made, self.dropout)


@pytest.mark.features("check")
def test_what_another_thread_seeds_is_no_fault_of_a_model() -> None:
    """Where it draws, it cannot be compared; where it does not, it is."""
    torch.manual_seed(0)
    batch, target = data(8)

    def checked(*blocks: nn.Module) -> Any:
        model = nn.Sequential(*blocks)
        pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2, transport="in-process")
        pipe.step(batch, target=target)
        return pipe.checked

    drawn = checked(nn.Linear(6, 6), Disturbed(0.5))
    assert (drawn.wrong, drawn.num_parameters) == ((), 0)
    assert "another thread seeded random generators meanwhile, from which this model draws" in drawn.unchecked
    silent = checked(nn.Linear(6, 6), Disturbed(0.0))
    assert (silent.wrong, silent.num_parameters, silent.unchecked) == ((), 4, "")


def test_a_refused_gradient_leaves_no_hook_behind() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, torch.sin(x)

    class Across(nn.Module):
        received: Any = None

        def forward(self, value: Any) -> Any:
            self.received = value
            x, hidden = value
            torch.autograd.grad((x * hidden).sum(), x)
            return x

    across = Across()
    model = nn.Sequential(nn.Linear(6, 6), Pairs(), across, nn.Linear(6, 6))
    pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=1, num_ranks=2)
    batch, target = data(4)
    with refused(ModelError, "one of 2 tensors that it received"):
        pipe.step(batch, target=target)
    assert not any(value._backward_hooks for value in across.received)


class Follows(nn.Module):
    """A model that is no chain, so that it is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first) + first)


def pieces(model: nn.Module) -> list[str]:
    return [block.name for block in pieces_of(model, Inputs((torch.ones(2, 6),), {}))]


def test_models_are_followed_in_two_threads_at_once() -> None:
    class Meeting(Follows):
        def forward(self, x: Tensor) -> Any:
            meet()
            made = super().forward(x)
            meet()
            return made

    before, meet, found = attributes(), threading.Barrier(2, timeout=20).wait, list[list[str]]()
    models = [Meeting(), Meeting()]
    threads = [threading.Thread(target=lambda value=model: found.append(pieces(value))) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["layers.0", "layers.1", "layers.2"]] * 2
    assert attributes() == before


def test_a_users_own_call_of_modules_is_there_before_and_after() -> None:
    plain, called = vars(nn.Module)["__call__"], list[str]()

    def own(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(type(self).__name__)
        return plain(self, *args, **kwargs)

    with replaced(nn.Module, "__call__", own):
        assert pieces(Follows()) == ["layers.0", "layers.1", "layers.2"]
        assert vars(nn.Module)["__call__"] is own
    assert called == ["Follows", "Linear", "Linear", "Linear"]
    assert vars(nn.Module)["__call__"] is plain


def test_functions_are_copied_along_in_two_threads_at_once() -> None:
    class Slow:
        def __deepcopy__(self, memo: Any) -> Slow:
            barrier.wait()
            return Slow()

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = kept = [Slow()]
            self.keep = lambda: kept

    barrier, own = threading.Barrier(2, timeout=20), dict(copy._deepcopy_dispatch)  # type: ignore[attr-defined]
    made = list[Any]()
    models = [Keeps(), Keeps()]
    threads = [threading.Thread(target=lambda value=model: made.append(copied(value, {}))) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value.keep() is value.kept for value in made] == [True, True]
    assert not any(value.kept is other.kept for value in made for other in models)
    assert own == copy._deepcopy_dispatch  # type: ignore[attr-defined]


def test_a_guard_of_parameters_that_are_gone_minds_no_other_optimizer() -> None:
    told: list[Any] = []
    guard = Guard([nn.Parameter(torch.zeros(1))], told.append, told.append)
    for _ in range(50):  # one of them has the id of the parameter that is gone
        parameter = nn.Parameter(torch.ones(1))
        torch.optim.SGD([parameter], lr=0.1).step()
        del parameter
    assert told == []
    assert guard.before is not None


def test_a_guard_sees_parameters_that_an_optimizer_gets_later() -> None:
    told: list[Any] = []
    first, later = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    guard = Guard([later], told.append, told.append)
    optimizer = torch.optim.SGD([first], lr=0.1)
    optimizer.step()
    assert told == []
    optimizer.add_param_group({"params": [later]})
    optimizer.step()
    assert told == [optimizer, optimizer]
    del guard
    optimizer.step()
    assert len(told) == 2
