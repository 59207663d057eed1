"""Sentinels: later steps are checked too, by the ranks' own blocks, with nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from chain_tricks import RIGHT, WIDTH, Step, row
from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, ModelError, UsageError
from drumline.features.check.model_check import ModelCheck
from drumline.features.check.sentinels import Sentinels
from drumline.features.check.trial import Trial
from drumline.pipeline.pipeline import Pipeline
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("check")]


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def pipeline(model: Any, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "balance": "even"}
    if not isinstance(model, nn.Sequential):
        given["example"] = data()[0]
    return Pipeline(model, **{**given, "device": "cpu", **settings})


def alone(model: Any, **settings: Any) -> Pipeline:
    return pipeline(model, num_ranks=2, transport="in-process", **settings)


class Around(nn.Module):
    """A path around blocks, with a parameter, a buffer and random numbers between them."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + functional.dropout(layer(x).tanh() * self.gain + self.shift, 0.2)
        return x


class Gains(nn.Module):
    """Layers with parameters between them, each of which one rank alone trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.gains = nn.ParameterList([torch.full((WIDTH,), 1.5 + at) for at in range(4)])

    def forward(self, x: Tensor) -> Any:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = x + layer(x).tanh() * gain
        return x


def trained(
    pipe: Pipeline,
    num_steps: int,
    spoil: Callable[[int], object] = lambda step: None,
    *,
    parts: bool = False,
    **settings: Any,
) -> list[int]:
    """Train, and return which steps were checked; with `parts`, each rank gets only what it needs."""
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.05, **settings)
    found = []
    for step in range(num_steps):
        spoil(step)
        x, y = data(step)
        first, last = pipe.num_ranks == 1 or pipe.rank == 0, pipe.transport == "in-process" or pipe.rank == 1
        pipe.step(x if first or not parts else None, target=y if last or not parts else None)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.checked is not None and pipe.checked.step == step and step not in found:
            assert (pipe.checked.wrong, pipe.checked.unchecked) == ((), "")
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("when", "checked"), [(True, [0, 2, 10]), ("first", [0]), (4, [0, 4, 8, 12]), (1, list(range(13))), (False, [])]
)
def test_the_setting_says_which_steps_are_checked(when: Any, checked: list[int]) -> None:
    assert trained(alone(row(Step(), Step()), check_model=when), 13) == checked


def test_a_run_of_ten_thousand_steps_has_thirteen() -> None:
    sentinels = Sentinels(True)
    assert sum(sentinels.takes(step) for step in range(1, 10_001)) == 13


@pytest.mark.parametrize("when", [0, -1, 1.5, "always", None])
def test_another_setting_is_refused(when: Any) -> None:
    with refused(UsageError, "check_model is", expected='"first", or a number'):
        alone(row(Step(), Step()), check_model=when)


class Turns(Step):
    """Computes something else in a pipeline from some step on: it overwrites an input that its backward reads."""

    is_wrong = False
    last: Tensor

    def forward(self, x: Tensor) -> Any:
        made = super().forward(x)
        self.last = x.detach()
        if self.is_wrong:
            made.register_hook(lambda gradient: gradient * (1 + self.last.mean()))
        return made


def test_what_goes_wrong_later_is_found_by_a_sentinel_before_the_optimizer_steps() -> None:
    torch.manual_seed(0)
    block = Turns()
    pipe = alone(row(Step(), block, Step(), Step()), check_model=3, schedule="gpipe")
    before: dict[str, Tensor] = {}

    def spoil(step: int) -> None:
        block.is_wrong = step >= 4
        before.update({name: param.detach().clone() for name, param in pipe.named_parameters()})

    with refused(ModelError, "returns something else than by itself in step 6: the gradient of 0"):
        trained(pipe, 9, spoil)
    assert all(torch.equal(param, before[name]) for name, param in some(pipe.named_parameters()))
    with refused(ModelError, "in step 6"):
        pipe.step(data()[0], target=data()[1])


def test_a_step_that_fails_on_its_way_leaves_no_witness() -> None:
    fails: list[bool] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if fails and fails.pop():
            raise RuntimeError("a loss broke")
        return functional.mse_loss(output, target)

    pipe = alone(row(Step(), Step()), check_model=2, loss_fn=loss_fn)
    trained(pipe, 2)
    fails[:] = [True, False]  # first in the check, where nothing is wrong, then in the step
    x, y = data()
    with pytest.raises(RuntimeError, match="a loss broke"):
        pipe.step(x, target=y)
    pipe.step(x, target=y)
    assert pipe.checked is not None
    assert (pipe.checked.step, pipe.checked.wrong) == (2, ())


@pytest.mark.features("moving")
def test_a_state_a_move_and_another_trace_are_checked() -> None:
    model = Around()
    pipe = alone(model, check_model=100)

    def change(step: int) -> None:
        if step == 2:
            pipe.load_state_dict(pipe.state_dict())
        elif step == 4:
            pipe.repartition(balance=[1, 3])
        elif step == 6:
            model.layers[1].register_forward_hook(lambda *_: None)

    assert trained(pipe, 8, change) == [0, 2, 4, 6]


def test_inputs_of_another_kind_are_checked_soon() -> None:
    pipe = alone(Around(), check_model=100, num_microbatches=2)
    found = []
    for step in range(6):
        rows = 8 if step < 2 else 4
        x, y = (tensor[:rows] for tensor in data(step))
        pipe.step(x, target=y)
        pipe.zero_grad()
        if pipe.checked is not None and pipe.checked.step == step:
            found.append(step)
    assert found == [0, 4]  # as soon as all ranks have told that they traced it


def test_sentinels_change_nothing() -> None:
    """Counters, generators and averages of blocks go on as without them."""
    for name in ("a counter", "a generator", "an average", "a counter in a closure", "dropout", "batch norm"):
        ends = []
        for when in ("first", 1):
            torch.manual_seed(0)
            pipe = alone(RIGHT[name](), check_model=when)
            trained(pipe, 3)
            ends.append(pipe.state_dict())
        assert all(torch.equal(end, ends[1][key]) for key, end in some(ends[0].items())), name


# ---- on ranks of their own -------------------------------------------------------------------------------------------


def tied() -> nn.Sequential:
    model = row(Step(), Step(), Step(), Step())
    model[3].layer.weight = model[0].layer.weight  # type: ignore[union-attr]
    return model


def stepped(make: Callable[[], Any], *, keep: bool = True, validated: str = "before", **settings: Any) -> Any:
    """Train on this rank; return which steps were checked, or the error."""
    torch.manual_seed(0)
    model = make()
    seen = ref(model)
    pipe = pipeline(model, timeout=60, **{"check_model": 1, **settings})
    if not keep:
        del model
    try:
        checked = trained(pipe, 3, validated=validated, parts=not keep)
    except (DrumlineError, AssertionError) as error:
        return str(error)
    gc.collect()
    assert pipe.checked is not None
    return checked, pipe.checked.num_parameters, seen() is None


def moved(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make()
    pipe = pipeline(model, timeout=60, check_model=100)

    def change(step: int) -> None:
        if step == 2:
            pipe.repartition(balance=[1, 3])
        elif step == 4:
            pipe.repartition(balance=[3, 1])

    try:
        return trained(pipe, 6, change)
    except (DrumlineError, AssertionError) as error:
        return str(error)


def spoiled(make: Callable[[], Any], layer: Callable[[Any], nn.Linear]) -> str:
    """Have the pipeline's gradients wrong from the second step on, and those of the model by itself right."""
    torch.manual_seed(0)
    model = make()
    pipe = pipeline(model, timeout=60, check_model=2)
    inside: list[bool] = []
    right = Trial.before

    def before(*args: Any) -> None:
        inside.append(True)
        right(*args)
        inside.pop()

    layer(model).weight.register_hook(lambda gradient: gradient if inside else gradient * 1.01)  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "before", before)
        patch.setattr(ModelCheck, "is_pending", property(lambda self: False, lambda self, value: None), raising=False)
        try:
            trained(pipe, 4)
        except DrumlineError as error:
            return str(error)
    return ""


def on_a_rank() -> dict[str, Any]:
    return {
        "dropout": stepped(RIGHT["dropout"]),
        "one block twice": stepped(RIGHT["one block twice"]),
        "tied, recomputed": stepped(tied, checkpoint="full", schedule="zb-v"),
        "two copies": stepped(RIGHT["plain"], schedule="dualpipe"),
        "let go": stepped(RIGHT["a counter"], keep=False),
        "traced": stepped(Around),
        "traced, let go": stepped(Around, keep=False),
        "between blocks": stepped(Gains, keep=False),
        "validated after": stepped(RIGHT["plain"], validated="after"),
        "moved chain": moved(RIGHT["plain"]),
        "moved": moved(Around),
        "wrong chain": spoiled(RIGHT["plain"], lambda model: model[2].layer),
        "wrong": spoiled(Around, lambda model: model.layers[2]),
    }


@pytest.mark.features("moving", "validated")
def test_ranks_check_later_steps_by_their_own_blocks() -> None:
    for rank in some(launch(on_a_rank, num_ranks=2, timeout=300)):
        every = [0, 1, 2]
        assert rank["validated after"] == rank["two copies"] == (every, 8, False)
        assert rank["let go"] == (every, 8, True)  # no rank holds more than its stages
        assert rank["dropout"] == (every, 4, False)
        assert rank["one block twice"] == (every, 6, False)
        assert rank["tied, recomputed"] == (every, 7, False)
        assert rank["traced"] == (every, 9, False)
        assert rank["traced, let go"] == (every, 9, True)
        assert rank["between blocks"] == (every, 12, True)
        assert rank["moved chain"] == rank["moved"] == [0, 2, 4]
        for name, block in (("wrong chain", "2"), ("wrong", "layers.2")):
            assert f"returns something else than by itself in step 2: the gradient of {block}" in rank[name], rank[name]
