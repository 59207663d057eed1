"""Models that take gradients inside their own forward: those of a plain loop, or refused; never a part of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.pipeline.pipeline import Pipeline
from matrices import matrix
from refused import refused
from torch_models import Reference, data, programs

pytestmark = pytest.mark.torch
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "dualpipe")


class Smooth(nn.Module):
    """A module with parameters and no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, 36).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Energy(nn.Module):
    """Hands on the forces of an energy: the gradient of a small network with respect to its input."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        first, second, last = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 1, bias=False)
        self.energy = nn.Sequential(
            first, nn.Tanh(), nn.LayerNorm(8), nn.Dropout(dropout), second, Smooth(), nn.Tanh(), last
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x * 1.0 if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return x - force


class Penalty(nn.Module):
    """Adds how steep a layer is, after the layer's own output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x * 1.0 if x.requires_grad else x.detach().requires_grad_()
            made = torch.sin(self.layer(x))
            (steep,) = torch.autograd.grad(made.pow(2).sum(), x, create_graph=True)
        return made + steep.pow(2).mean(-1, keepdim=True)


class Transformed(nn.Module):
    """Takes its derivatives by a transform of functions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.smooth, self.how = nn.Linear(6, 6), Smooth(), how

    def forward(self, x: Tensor) -> Any:
        def energy(tensor: Tensor) -> Any:
            return self.smooth(torch.sin(self.layer(tensor))).sum()

        if self.how == "grad":
            return x + torch.func.grad(energy)(x)
        if self.how == "vmap grad":
            return x + torch.func.vmap(torch.func.grad(energy))(x)
        if self.how == "vmap":
            return x + torch.func.vmap(lambda value: self.smooth(torch.sin(self.layer(value))))(x)
        made = torch.func.jvp(lambda value: torch.sin(self.layer(value)), (x,), (x * 0.5,))
        return made[0] + made[1] + self.smooth(x)


class Normed(nn.Module):
    """Changes buffers before it takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(6), Energy()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(self.norm(x))
        return made


class Hooked(nn.Module):
    """Has a hook on what a layer returns, which changes its gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        if made.requires_grad:
            made.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        return torch.sin(made)


class Scaled(nn.Module):
    """A layer that finds a tensor in an attribute, beside its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, 36).view(6, 6))
        self.scale: Any = None

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight * self.scale


class Styled(nn.Module):
    """Computes what one of its layers is scaled by, and leaves it there."""

    def __init__(self) -> None:
        super().__init__()
        self.style, self.scaled = nn.Linear(6, 6), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        self.scaled.scale = torch.sigmoid(self.style(x))
        return torch.sin(self.scaled(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "energy": Energy,
    "energy with dropout": lambda: Energy(0.3),
    "penalty": Penalty,
    "func.grad": lambda: Transformed("grad"),
    "func.vmap of func.grad": lambda: Transformed("vmap grad"),
    "func.vmap": lambda: Transformed("vmap"),
    "func.jvp": lambda: Transformed("jvp"),
    "buffers": Normed,
    "hook on a layer with a formula": lambda: Hooked(nn.Linear(6, 6)),
    "hook on a layer with a graph of its own": lambda: Hooked(Smooth()),
    "tensor in a layer's attribute": Styled,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, on the first jvp
@matrix("name, schedule, checkpoint", MODELS, SCHEDULES, ("none", "full"))
def test_gradients_of_gradients_are_those_of_one_process(name: str, schedule: str, checkpoint: str) -> None:
    if name == "buffers" and schedule == "dualpipe":
        pytest.skip("running statistics in two copies are refused")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), MODELS[name](), nn.Linear(6, 6), MODELS[name]())
    (program,) = programs(schedule, 2, (4,))
    reference = Reference(model, program, functional.mse_loss)
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, num_ranks=2, checkpoint=checkpoint)
    for step in range(2):
        batch, target = data(12, seed=step)
        result = pipe.step(batch, target=target)
        assert result.loss is not None
        torch.testing.assert_close(result.loss, reference.step(batch, target), rtol=1e-6, atol=1e-7)
    reference.compare(pipe, exact=False)
    buffers = list(zip(model.buffers(), reference.model.buffers(), strict=True))
    assert bool(buffers) is (name == "buffers")
    assert all(torch.equal(tensor, other) for tensor, other in buffers)


def test_layers_beside_a_transform_still_wait_for_w() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Transformed("vmap"), nn.Linear(6, 6))
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", num_microbatches=1, num_ranks=1)
    stage = pipe._engine.executors[0].stages[0]
    batch, target = data(4)
    stage.forward(0, batch, target)
    (this,) = stage.passes[0]
    assert this.tape is not None
    assert len(this.tape.records) == 2


class Pairs(nn.Module):
    """Hands on its input beside what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.sin(self.layer(x))


class Across(nn.Module):
    """Takes a gradient that goes back into the stages before."""

    def __init__(self, cut_off: bool = False) -> None:
        super().__init__()
        self.layer, self.cut_off = nn.Linear(6, 6), cut_off

    def forward(self, value: Any) -> Any:
        x, hidden = value
        with torch.enable_grad():
            x = x.view_as(x) if self.cut_off else x
            energy = torch.sin(self.layer(x) + hidden).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_gradient_that_reaches_into_earlier_stages_is_refused(schedule: str) -> None:
    batch, target = data(8)

    def pipeline(cut_off: bool) -> Pipeline:
        model = nn.Sequential(nn.Linear(6, 6), Pairs(), Across(cut_off), nn.Linear(6, 6))
        return Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, num_microbatches=4, num_ranks=2)

    with refused(ModelError, "one of 2 tensors that it received"):
        pipeline(False).step(batch, target=target)
    with refused(ModelError, "one of 2 tensors that it received"):
        pipeline(False).eval_step(batch)
    pipeline(True).step(batch, target=target)


def test_a_loss_may_take_gradients_of_what_the_last_stage_made() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x * 1.0
            return x, torch.sin(self.layer(x))

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        x, energy = output
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return functional.mse_loss(force, target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Last())
    (program,) = programs("zb-h1", 2, (4,))
    reference = Reference(model, program, loss_fn)
    pipe = Pipeline(model, loss_fn=loss_fn, schedule=program, num_ranks=2)
    batch, target = data(8)
    pipe.step(batch, target=target)
    reference.step(batch, target)
    reference.compare(pipe, exact=False)


class CallsBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        if torch.is_grad_enabled():
            torch.autograd.backward(made.pow(2).sum(), retain_graph=True)
        return made


def test_backward_inside_a_forward_is_refused_where_its_gradient_would_be_lost() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), CallsBackward())
    whole = copy.deepcopy(model)
    batch, target = data(8)
    Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2).step(batch, target=target)
    for a, b in zip(batch.chunk(4), target.chunk(4), strict=True):
        torch.autograd.backward(functional.mse_loss(whole(a), b) / 4)
    for param, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)
    pipe = Pipeline(whole, loss_fn=functional.mse_loss, schedule="zb-h1", num_microbatches=4, num_ranks=2)
    with refused(ModelError, r"calls backward\(\) inside its forward"):
        pipe.step(batch, target=target)


def test_a_block_that_takes_gradients_only_later_is_followed_unless_it_has_buffers() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.takes = Penalty(), False
            self.register_buffer("kept", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.inner(x) if self.takes else self.inner.layer(x)
            return made

    for buffers in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Later())
        if not buffers:
            del model[1].kept
        (program,) = programs("zb-h1", 2, (4,))
        reference = Reference(model, program, functional.mse_loss)
        pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, num_ranks=2)
        batch, target = data(8)
        pipe.step(batch, target=target)
        reference.step(batch, target)
        for module in (*model.modules(), *reference.model.modules()):
            if isinstance(module, Later):
                module.takes = True
        if buffers:
            with refused(ModelError, "begins to take gradients"):
                pipe.step(batch, target=target)
        else:
            pipe.step(batch, target=target)
            reference.step(batch, target)
            reference.compare(pipe, exact=False)
