"""Models that do unusual things: the gradients are those of a plain loop, or the model is refused; never wrong."""

from __future__ import annotations

import copy
import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from drumline.core.errors import ModelError, NonFiniteError, RunError
from drumline.pipeline.pipeline import Pipeline
from refused import refused
from tally import Notes as Unseen

pytestmark = pytest.mark.torch
SCHEDULES = ("1f1b", "zb-h1", "zb-v")


def layer() -> nn.Linear:
    return nn.Linear(6, 6)


class TwoTerms(nn.Module):
    """Two parameters whose gradient is one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.first + self.second)


class Shift(nn.Module):
    """Its gradient is the very tensor that goes to the stage before."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2, 6))
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x) + self.shift
        return made


class Named(NamedTuple):
    x: Tensor
    more: Tensor


@dataclass
class Fields:
    x: Tensor
    more: Tensor


@dataclass(frozen=True)
class LateFields:
    x: Tensor
    more: Tensor = field(init=False)


def late_fields(x: Tensor, more: Tensor) -> LateFields:
    made = LateFields(x)
    object.__setattr__(made, "more", more)
    return made


class Opaque:
    def __init__(self, x: Tensor, more: Tensor) -> None:
        self.x, self.more = x, more


class Wraps(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.wrap = layer(), wrap

    def forward(self, x: Tensor) -> Any:
        made = self.layer(x)
        return self.wrap(made, 2 * made)


class Unwraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, value: Any) -> Tensor:
        x, more = (value["x"], value["more"]) if isinstance(value, dict) else (value.x, value.more)
        made: Tensor = self.layer(x) + more
        return made


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.recurrent = layer(), nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        both = torch.stack([made, 2 * made], 1)
        packed = nn.utils.rnn.pack_padded_sequence(both, torch.full((len(x),), 2), batch_first=True)
        out: Tensor = self.recurrent(packed)[1][0][-1] + made
        return out


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        doubled = {name: 2 * param for name, param in self.layer.named_parameters()}
        made: Tensor = torch.func.functional_call(self.layer, doubled, (x,))
        return made


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(torch.complex(x, x)).abs()
        return made


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = self.layer(x)
        made: Tensor = self.layer(x) - 0.5 * constant
        return made


class Notes(nn.Module):
    """Hands a number on beside its output and reads it on the host, as can be done where it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, value: Any) -> Any:
        x, number = value if isinstance(value, tuple) else (value, value.detach()[:, :1] * 0.1)
        return torch.tanh(self.layer(x)) + float(number.numpy().mean()), number


class First(nn.Module):
    def forward(self, value: Any) -> Any:
        return value[0]


def pruned() -> nn.Module:
    linear = layer()
    prune.random_unstructured(linear, "weight", 0.5)  # type: ignore[no-untyped-call]
    return linear


ODD: dict[str, Callable[[], nn.Sequential]] = {
    "two terms": lambda: nn.Sequential(layer(), TwoTerms(), layer(), TwoTerms()),
    "shift": lambda: nn.Sequential(Shift(), Shift(), Shift(), Shift()),
    "named tuple": lambda: nn.Sequential(layer(), Wraps(Named), Unwraps(), layer()),
    "dataclass": lambda: nn.Sequential(layer(), Wraps(Fields), Unwraps(), layer()),
    "ordered": lambda: nn.Sequential(layer(), Wraps(lambda x, m: OrderedDict(x=x, more=m)), Unwraps(), layer()),
    "packed": lambda: nn.Sequential(layer(), Packed(), layer(), Packed()),
    "functional": lambda: nn.Sequential(layer(), Functional(), layer(), Functional()),
    "complex": lambda: nn.Sequential(layer(), Complex(), layer(), layer()),
    "without gradient": lambda: nn.Sequential(layer(), WithoutGradient(), layer(), WithoutGradient()),
    "pruned": lambda: nn.Sequential(layer(), pruned(), pruned(), layer()),
    "late dataclass": lambda: nn.Sequential(layer(), Wraps(late_fields), Unwraps(), layer()),
    "number beside": lambda: nn.Sequential(Notes(), Notes(), Notes(), Notes(), First()),
    "in place at a cut": lambda: nn.Sequential(layer(), layer(), nn.ReLU(inplace=True), layer()),
}


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 6)


def plain(model: nn.Module, steps: int = 1) -> None:
    x, y = data()
    for _ in range(steps):
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            torch.autograd.backward(functional.mse_loss(model(a), b) / 4)


def pipeline(model: nn.Sequential, schedule: str = "1f1b", **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "num_ranks": 2, **settings}
    return Pipeline(model, schedule=schedule, **given)


def same(model: nn.Module, whole: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert param.grad is not None, name
        assert other.grad is not None, name
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ODD)
def test_odd_models_get_the_gradients_of_a_plain_loop(name: str, schedule: str) -> None:
    torch.manual_seed(0)
    model = ODD[name]()
    torch.manual_seed(0)
    whole = ODD[name]()
    plain(whole, steps=2)
    pipe = pipeline(model, schedule)
    x, y = data()
    for _ in range(2):
        pipe.step(x, target=y)
    pipe.settle()
    same(model, whole)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_of_parameters_run(schedule: str) -> None:
    calls: list[int] = []

    def hooked() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(layer(), nn.LayerNorm(6), TwoTerms(), Shift())
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
            noted: Any = parameter.register_post_accumulate_grad_hook
            noted(lambda parameter: calls.append(id(parameter)))
        return model

    model, whole = hooked(), hooked()
    plain(whole)
    expected = len(calls)
    calls.clear()
    pipe = pipeline(model, schedule)
    x, y = data()
    pipe.step(x, target=y)
    same(model, whole)
    assert len(calls) == expected == 4 * len(list(model.parameters()))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_may_be_frozen_and_freed_between_steps(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer(), layer(), layer(), layer())
    pipe = pipeline(model, schedule)
    model[1].requires_grad_(False)
    x, y = data()
    pipe.step(x, target=y)
    pipe.settle()
    assert model[1].weight.grad is None
    for frozen in (False, True):
        model.requires_grad_(True)
        model[2].requires_grad_(not frozen)
        pipe.zero_grad()
        whole = copy.deepcopy(model)
        plain(whole)
        pipe.step(x, target=y)
        pipe.settle()
        for param, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad)


def test_an_object_that_hides_its_tensors_is_refused() -> None:
    pipe = pipeline(nn.Sequential(layer(), Wraps(Opaque), Unwraps(), layer()))
    x, y = data()
    with refused(ModelError, "a Opaque with tensors inside"):
        pipe.step(x, target=y)


class ChangesInput(nn.Module):
    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.layer, self.draws = layer(), draws

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        if self.draws:
            torch.rand(1)
        made: Tensor = self.layer(x.clone())
        return made


def test_an_input_changed_in_place_is_refused_where_it_would_be_used_twice() -> None:
    pipe = pipeline(nn.Sequential(ChangesInput(draws=True), layer()))
    x, y = data()
    with refused(ModelError, "changes its input in place"):
        pipe.step(x, target=y)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_that_change_their_input_in_place_may_be_recomputed(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer(), *(nn.Sequential(nn.ReLU(inplace=True), layer()) for _ in range(3)))
    x, y = data()
    whole = copy.deepcopy(model)
    pipe = pipeline(model, schedule=schedule, checkpoint="full")
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, target=y)
        pipe.settle()
        whole.zero_grad()
        plain(whole)
        for param, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad)


class Lottery(nn.Module):
    """Leaves its layer out at random, by Python's or numpy's numbers; notes what it decided."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw, self.notes = layer(), draw, Unseen()

    def forward(self, x: Tensor) -> Tensor:
        number = self.draw()
        self.notes.add(number)
        result: Tensor = x * number + self.layer(x)
        return result


@pytest.mark.parametrize("draw", [random.random, np.random.random])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_recomputed_blocks_draw_again_what_they_drew_from_python_and_numpy(schedule: str, draw: Any) -> None:
    blocks = [Lottery(draw) for _ in range(2)]
    pipe = pipeline(nn.Sequential(*blocks), schedule, checkpoint="full", num_microbatches=1, check_model=False)
    x, y = data()
    pipe.step(x, target=y)
    pipe.settle()
    for block in blocks:
        first, again = block.notes.rows
        assert first == again
    assert blocks[0].notes.rows != blocks[1].notes.rows


def test_a_second_pipeline_over_the_model_leaves_the_first_ones_guard_alone() -> None:
    model = nn.Sequential(layer(), layer())
    pipe = pipeline(model)
    second = pipeline(model, loss_fn=None)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    x, y = data()
    pipe.step(x * float("inf"), target=y)
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            optimizer.step()
        second.eval_step(x)
        pipe.eval_step(x)
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def test_evaluating_for_ever_keeps_nothing() -> None:
    pipe = pipeline(nn.Sequential(layer(), layer()), loss_fn=None)
    x, _ = data()
    for _ in range(20):
        pipe.eval_step(x)
    assert len(pipe._ledger._open) <= 2


def test_two_copies_in_one_process_follow_the_model() -> None:
    torch.manual_seed(0)
    model, new = (nn.Sequential(layer(), layer(), layer(), layer()) for _ in range(2))
    pipe = pipeline(model, "dualpipe")
    model.load_state_dict(new.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(new.parameters(), lr=0.1)
    x, y = data()
    for _ in range(3):
        result = pipe.step(x, target=y)
        torch.testing.assert_close(result.loss, functional.mse_loss(new(x), y).detach())
        plain(new)
        for sgd in (optimizer, theirs):
            sgd.step()
            sgd.zero_grad()
        torch.testing.assert_close(pipe.eval_step(x).output, new(x).detach())


def test_running_statistics_in_two_copies_are_refused() -> None:
    with refused(ModelError, "keeps running statistics"):
        pipeline(nn.Sequential(layer(), nn.BatchNorm1d(6)), "chimera")


def test_a_step_in_inference_mode_is_refused() -> None:
    pipe = pipeline(nn.Sequential(layer(), layer()))
    x, y = data()
    with torch.inference_mode(), refused(RunError, "inference_mode"):
        pipe.step(x, target=y)


def test_weighing_does_not_hide_a_change_in_place() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.layer(x)).mul_(2)

    x, y = data()
    for weigh in (False, True):
        pipe = pipeline(nn.Sequential(layer(), Bad()), weigh=weigh)
        with pytest.raises(RuntimeError, match="inplace operation"):
            pipe.step(x, target=y)


class LeavesALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer()
        self.extra: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        self.extra = made.square().mean()
        return made.tanh()


def test_a_loss_that_a_recomputed_block_leaves_in_an_attribute_is_refused() -> None:
    model = nn.Sequential(layer(), layer(), layer(), LeavesALoss())

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert isinstance(model[3].extra, Tensor)
        return functional.mse_loss(output, target) + model[3].extra

    pipe = Pipeline(model, loss_fn=loss_fn, num_ranks=2, num_microbatches=2, checkpoint="full")
    with refused(ModelError, "the loss uses a parameter"):
        pipe.step(torch.randn(4, 6), target=torch.randn(4, 6))


LOGGER = logging.getLogger(__name__)


class Logs(nn.Module):
    """Logs in its forward, as libraries do that have a logger for each module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for module in self.layers:
            LOGGER.debug("before a layer of %s", type(self).__name__)
            x = module(x)
        return x


def test_a_followed_model_may_log_in_its_forward() -> None:
    torch.manual_seed(0)
    model, batch, target = Logs(), torch.randn(4, 6), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model, loss_fn=functional.mse_loss, num_microbatches=2, num_ranks=2, balance="even", example=torch.zeros(4, 6)
    )
    for number in range(3):
        logging.getLogger(f"{__name__}.{number}").setLevel(logging.ERROR)
        pipe.step(batch, target=target)
        torch.autograd.backward(functional.mse_loss(plain(batch), target))
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)
