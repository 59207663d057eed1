"""Losses as people write them, against the plain model on the whole batch: none is wrong, and no right one refused.

The reference is `loss_fn(model(batch), target).backward()` in one process.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nf

from drumline.core.errors import DrumlineError, ModelError
from drumline.engine.loss import comparing
from drumline.engine.loss.rules import rows
from drumline.engine.loss.rules.compare import compare
from drumline.engine.loss.rules.rules import MEAN, SUM, found_in
from drumline.pipeline.pipeline import Pipeline
from losses import MIXED, NAMED, RIGHT, ROWS, WIDTH, Learned, Output, classes, noisy, numbers
from refused import refused

pytestmark = pytest.mark.torch


def body() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, WIDTH))


def trained(pipe: Pipeline, plain: nn.Module, loss_fn: Any, make: Any, *, steps: int = 2) -> None:
    """Run steps, the second with padding, and compare each with the plain model's."""
    for step in range(steps):
        x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))
        target = make(step)
        pipe.zero_grad()
        plain.zero_grad()
        loss = pipe.step(x, target=target).loss
        wanted = loss_fn(plain(x), target)
        torch.autograd.backward(wanted)
        wanted = wanted.detach()
        near = 2e-2 if wanted.dtype is torch.bfloat16 else 1e-4  # where shares are rounded to it
        assert loss is not None
        assert abs(float(loss) - float(wanted)) <= near * max(abs(float(wanted)), 1e-3)
        mine = dict(pipe.named_parameters())
        for name, param in plain.named_parameters():
            grad = mine[name].grad
            assert (grad is None) == (param.grad is None), name
            if param.grad is not None:
                torch.testing.assert_close(grad, param.grad, rtol=near, atol=10 * near * float(param.grad.abs().max()))


def pipeline(model: nn.Module, loss_fn: Any, **settings: Any) -> Pipeline:
    given = {"num_ranks": 2, "transport": "in-process", "device": "cpu", **settings}
    return Pipeline(model, loss_fn=loss_fn, **given)


def counts(name: str) -> int:
    """Return a number of microbatches: 2, one that divides no rows, or one row in each; every loss has another."""
    return (2, 5, ROWS)[sorted({**NAMED, **RIGHT, **MIXED}).index(name) % 3]


@pytest.mark.parametrize("name", [*NAMED, *RIGHT])
def test_means_and_sums_are_those_of_the_whole_batch(name: str) -> None:
    loss_fn, make = {**NAMED, **RIGHT}[name]
    pipe = pipeline(body(), copy.deepcopy(loss_fn), num_microbatches=counts(name))
    if name == "dropout and noise":  # which no two runs draw alike
        assert pipe.step(torch.randn(ROWS, 5), target=make(0)).loss is not None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(pipe, body(), loss_fn, make)


@pytest.mark.parametrize("name", ["sum / len", "mean + sum", "ELBO", "masked_select", "four tasks"])
@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe"])
def test_under_any_schedule(name: str, schedule: str) -> None:
    loss_fn, make = {**NAMED, **RIGHT}[name]
    trained(pipeline(body(), loss_fn, num_microbatches=4, schedule=schedule), body(), loss_fn, make)


@pytest.mark.parametrize("name", MIXED)
def test_what_is_no_mean_or_sum_is_refused(name: str) -> None:
    loss_fn, make = MIXED[name]
    random.seed(0)
    pipe = pipeline(body(), loss_fn, num_microbatches=counts(name))
    with refused(DrumlineError, r"of the full batch|could not be compared|averages over different"):
        pipe.step(torch.randn(ROWS, 5), target=make(1))
    assert all(param.grad is None for param in pipe.parameters())


def test_what_mixes_rows_by_chance_is_named() -> None:
    pipe = pipeline(body(), MIXED["permuted rows"][0], num_microbatches=2)
    with refused(ModelError, "it draws from randperm,", fix="pass loss_weight="):
        pipe.step(torch.randn(ROWS, 5), target=numbers(0))
    pipe = pipeline(body(), lambda o, t: nf.mse_loss(o, t) * random.random(), num_microbatches=2)
    with pytest.warns(UserWarning, match="draws from Python's or numpy's random generators"):
        pipe.step(torch.randn(ROWS, 5), target=numbers(0))


def test_comparing_draws_nothing_and_leaves_no_trace() -> None:
    own = torch.Generator().manual_seed(3)
    seen: list[int] = []

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        seen.append(len(o))
        return noisy(o, t) + torch.rand(1, generator=own).sum() * 0.0

    pipe = pipeline(body(), loss_fn, num_microbatches=3)
    before = torch.get_rng_state(), random.getstate()
    pipe.step(torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0)), target=numbers(0))
    assert seen == [4, 4, 4]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    other = torch.Generator().manual_seed(3)
    torch.rand(3, generator=other)  # one for each microbatch
    assert torch.equal(own.get_state(), other.get_state())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_penalty_on_all_weights_is_added_once(reduction: str, schedule: str) -> None:
    model, plain = body(), body()

    def loss_fn(o: Tensor, t: Tensor, weights: nn.Module = model) -> Tensor:
        return nf.mse_loss(o, t, reduction=reduction) + 0.1 * sum(param.pow(2).sum() for param in weights.parameters())

    pipe = pipeline(model, loss_fn, num_microbatches=3, schedule=schedule)
    trained(pipe, plain, lambda o, t: loss_fn(o, t, plain), numbers)


@pytest.mark.features("stream")
def test_a_penalty_on_weights_that_other_ranks_update_says_what_to_do() -> None:
    model = body()

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return nf.mse_loss(o, t) + 0.1 * sum(param.pow(2).sum() for param in model.parameters())

    pipe = pipeline(model, loss_fn, num_microbatches=4, schedule="pipedream", num_ranks=2)
    pipe.optimizer(torch.optim.SGD, lr=0.1)
    with refused(ModelError, "or loss_fn, uses a parameter .* does not hold", fix="weight_decay"):
        pipe.step(torch.randn(ROWS, 5), target=numbers(0))


class Heads(nn.Module):
    """Returns a dataclass of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Output:
        made = self.linear(x)
        return Output(made, (x, made[:, :2]))


def test_outputs_and_targets_of_any_form() -> None:
    def loss_fn(o: Output, t: dict[str, Any]) -> Tensor:
        each = nf.cross_entropy(o.logits, t["both"][0], reduction="none")
        tensor: Tensor = (each * t["mask"]).sum() / t["mask"].sum()
        return tensor + 0.1 * o.hidden[0].abs().sum() / len(t["mask"]) + o.hidden[1].mean()

    def make(step: int) -> dict[str, Any]:
        mask = (torch.arange(ROWS) >= 5 * step).float()
        return {"both": (classes(step), numbers(step)), "mask": mask, "name": "a batch"}

    def model() -> nn.Sequential:
        return nn.Sequential(*list(body())[:2], Heads())

    trained(pipeline(model(), loss_fn, num_microbatches=3), model(), loss_fn, make)


def test_rows_that_are_flattened_or_second_are_found() -> None:
    class Words(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how = how

        def forward(self, x: Tensor) -> Tensor:
            each = x.view(len(x), 3, 2)
            return each.flatten(0, 1) if self.how == "flat" else each.transpose(0, 1)

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        flat = o if o.dim() == 2 else o.transpose(0, 1).flatten(0, 1)
        return nf.cross_entropy(flat, t.flatten(), reduction="sum") / len(t)

    def make(step: int) -> Tensor:
        return torch.randint(2, (ROWS, 3), generator=torch.Generator().manual_seed(step))

    for how in ("flat", "second"):
        model, plain = (nn.Sequential(*body(), Words(how)) for _ in range(2))
        trained(pipeline(model, loss_fn, num_microbatches=3), plain, loss_fn, make)


def test_a_loss_of_rows_that_do_not_fit_goes_by_its_calls_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "AFFORDABLE", 30)  # one row has 24 bytes
    pipe = pipeline(body(), lambda o, t: nf.mse_loss(o, t), num_microbatches=3)
    with pytest.warns(UserWarning, match=r"was not compared .*one row of its output has .*Pass loss_weight="):
        pipe.step(torch.randn(ROWS, 5), target=numbers(0))
    pipe = pipeline(body(), lambda o, t: nf.mse_loss(o, t).pow(1.0), num_microbatches=3)
    with refused(ModelError, "could not be compared .*one row of its output", fix="pass loss_weight="):
        pipe.step(torch.randn(ROWS, 5), target=numbers(0))
    monkeypatch.setattr(rows, "AFFORDABLE", 80)
    trained(pipeline(body(), NAMED["sum / len"][0], num_microbatches=2), body(), NAMED["sum / len"][0], numbers)


def test_a_short_last_batch_is_compared_again() -> None:
    pipe = pipeline(body(), lambda o, t: nf.mse_loss(o, t) if len(t) != 2 else o.std(0).sum(), num_microbatches=3)
    pipe.step(torch.randn(ROWS, 5), target=numbers(0))
    with refused(ModelError, "of the full batch"):
        pipe.step(torch.randn(6, 5), target=numbers(0)[:6])


OWN = {
    "sum / len": lambda o, t: nf.cross_entropy(o, t, reduction="sum") / len(t),
    "sum / numel": lambda o, t: (o**2).sum() / o.numel(),
    "* (1 / len)": lambda o, t: (o**2).sum() * (1 / len(t)),
    ".div(len)": lambda o, t: (o**2).sum().div(len(t)),
    "a tensor of len": lambda o, t: (o**2).sum() / torch.tensor(len(t)),
    "elements / len": lambda o, t: (0.3 * nf.cross_entropy(o, t, reduction="none") / len(t)).sum(),
    "a mean times len": lambda o, t: (o**2).mean() * len(t),
    "mean + sum / len": lambda o, t: nf.cross_entropy(o, t) + 0.1 * (o**2).sum() / len(t),
    "in place": lambda o, t: (o**2).sum().mul_(1 / len(t)),
}


class Own(nn.Module):
    """Computes its own loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.body, self.loss = body(), loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for module in self.body:
            x = module(x)
        return {"loss": self.loss(x, labels), "logits": x}


@pytest.mark.parametrize("name", OWN)
def test_a_models_own_loss_that_is_divided_by_its_rows(name: str) -> None:
    x, labels = torch.randn(ROWS, 5), classes(1)
    for count in (5, ROWS):
        model, plain = Own(OWN[name]), Own(OWN[name])
        pipe = Pipeline(
            model, num_ranks=2, num_microbatches=count, device="cpu", example={"x": x, "labels": labels}, balance="even"
        )
        loss = pipe.step(x=x, labels=labels).loss
        wanted = plain(x, labels)["loss"]
        torch.autograd.backward(wanted)
        assert loss is not None
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-4, atol=1e-6)
        mine = dict(pipe.named_parameters())
        for key, param in plain.named_parameters():
            torch.testing.assert_close(mine[key].grad, param.grad, rtol=1e-4, atol=1e-5)


def test_a_sum_of_many_equal_gradients_is_no_refusal() -> None:
    # float32's own norm of 131,072 equal numbers is off by 4e-5, which once made a sum no sum.
    output, target = (torch.randn(128, 1024, generator=torch.Generator().manual_seed(seed)) for seed in range(2))

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return nf.mse_loss(o, t) + 1e-3 * o.abs().sum()

    found = compare(loss_fn, output, target, 128, torch.device("cpu"))
    assert found is not None
    assert found_in(found).parts == ((MEAN,), (SUM,))


@pytest.mark.parametrize(("name", "most"), [("sum / len", 8), ("mean + sum", 8), ("var(0)", 30), ("hardest half", 30)])
def test_few_rows_are_compared_only_if_the_calls_show_all(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers_of_rows = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        made = compare(*args, **kwargs)
        numbers_of_rows.append(0 if made is None else made.rows.rows)
        return made

    monkeypatch.setattr(comparing, "compare", noted)
    pipe = pipeline(body(), {**NAMED, **MIXED}[name][0], num_microbatches=2)
    with contextlib.suppress(ModelError):
        pipe.step(torch.randn(60, 5), target=torch.randn(60, WIDTH))
    assert max(numbers_of_rows) == most


@pytest.mark.features("check")
def test_comparing_leaves_buffers_of_a_loss_as_they_were() -> None:
    loss_fn = Learned()
    pipe = pipeline(body(), loss_fn, num_microbatches=3, check_model=False)  # which puts back buffers too
    for step in range(2):
        pipe.step(torch.randn(ROWS, 5), target=numbers(step))
        assert float(loss_fn.calls) == 3 * (step + 1)  # one for each microbatch
