"""One update from several steps, by several optimizers, with evaluations between: nothing of it changes the other."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import MismatchError, NonFiniteError, RunError, UsageError
from drumline.model.blocks.script import Script
from drumline.pipeline.pipeline import Pipeline
from drumline.schedules import generate
from host_recorder import HostRecorder
from refused import refused
from some import some
from torch_models import data, mlp

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("settled_products")]

IGNORED = -100


def labels() -> list[tuple[Tensor, Tensor]]:
    """Two batches of rows with labels, most of the second one's ignored, and one whole microbatch of it."""
    torch.manual_seed(5)
    first = torch.randn(8, 6), torch.randint(4, (8,))
    second = torch.randn(8, 6), torch.tensor([1, IGNORED, IGNORED, IGNORED, 2, IGNORED, IGNORED, 3])
    return [first, second]


def classifier() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Whole(nn.Module):
    """The same as a model whose forward is followed, so that its first step is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = classifier()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


@pytest.mark.features("capture", "check", "precision")
@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "fp16"}, {"capture": True}, {"schedule": "dualpipe", "num_ranks": 2}],
    ids=["plain", "fp16", "captured", "two-copies"],
)
def test_shares_make_several_steps_one_mean_over_all_labels(settings: dict[str, Any]) -> None:
    batches = labels()
    plain = Whole()
    whole = functional.cross_entropy(plain(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches]))
    torch.autograd.backward(whole)
    settings = {"num_ranks": 2, "num_microbatches": 4, "loss_fn": functional.cross_entropy, **settings}
    counts = [int((y != IGNORED).sum()) for _, y in batches]
    with mock.patch("drumline.features.capture.engine.recorder_for", return_value=HostRecorder()):
        pipe = Pipeline(Whole(), example=batches[0][0], balance="parameters", **settings)
    near = 5e-3 if "precision" in settings else 1e-6
    for _ in range(3):  # as ever, captured, replayed
        losses = []
        for (x, y), count in some(zip(batches, counts, strict=True)):
            loss = pipe.step(x, target=y, share=count / sum(counts)).loss
            assert loss is not None
            losses.append(loss.item())
        assert pipe.checked is not None
        assert not pipe.checked.wrong
        parts = [loss * count / sum(counts) for loss, count in zip(losses, counts, strict=True)]
        assert sum(parts) == pytest.approx(whole.item(), rel=near)
        wanted = dict(plain.named_parameters())
        for name, param in some(pipe.named_parameters()):
            assert param.grad is not None
            expected = wanted[name].grad
            assert expected is not None
            assert torch.allclose(param.grad, expected, rtol=near, atol=near * float(expected.norm())), name
        pipe.zero_grad()


def test_a_share_is_a_number_above_zero() -> None:
    pipe = Pipeline(mlp(4), loss_fn=functional.mse_loss, num_microbatches=2, num_ranks=2)
    batch, target = data(4)
    for share in some([0, -1.0, float("nan"), float("inf"), True, "1", torch.ones(())]):
        with refused(UsageError, "share is"):
            pipe.step(batch, target=target, share=share)


@pytest.mark.features("precision")
def test_float32_copies_follow_each_their_own_optimizer() -> None:
    model = classifier().to(torch.bfloat16)
    pipe = Pipeline(model, loss_fn=functional.cross_entropy, num_microbatches=4, num_ranks=2, master_weights=True)
    muon = pipe.optimizer(torch.optim.Muon, names="*.weight", lr=0.02)
    adam = pipe.optimizer(torch.optim.AdamW, names=["*.bias"], lr=1e-4)
    copies = {name: nn.Parameter(param.detach().float()) for name, param in pipe.named_parameters()}
    plain: list[torch.optim.Optimizer] = [
        torch.optim.Muon([param for name, param in copies.items() if name.endswith("weight")], lr=0.02),
        torch.optim.AdamW([param for name, param in copies.items() if name.endswith("bias")], lr=1e-4),
    ]
    for x, y in some(labels()):
        pipe.step(x.bfloat16(), target=y)
        for name, param in pipe.named_parameters():
            assert param.grad is not None
            copies[name].grad = param.grad.clone()
        for optimizer in (muon, adam, *plain):
            optimizer.step()
            optimizer.zero_grad()
    for name, copied in some(pipe.named_master_weights()):
        assert torch.equal(copied, copies[name]), name
    for name, parameter in some(pipe.named_parameters()):
        assert torch.equal(parameter, copies[name].bfloat16()), name
    assert muon.state_dict()["state"].keys() == {"0.weight", "2.weight", "4.weight"}
    restored = pipe.optimizer(torch.optim.AdamW, names="*.bias", lr=1.0)
    restored.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert restored.param_groups[0]["lr"] == 1e-4
    with refused(UsageError, "no trainable parameter is named '0.biass'", fix="did you mean 0.bias"):
        pipe.optimizer(torch.optim.SGD, names=["0.biass"])


@pytest.mark.parametrize("master_weights", [False, True])
def test_groups_have_settings_of_their_own_and_what_is_left(master_weights: bool) -> None:
    if master_weights and find_spec("drumline.features.precision") is None:
        pytest.skip("needs precision")
    model, plain = classifier(), classifier()
    given: dict[str, Any] = {"master_weights": True} if master_weights else {}
    model, plain = (each.to(torch.float16 if master_weights else torch.float32) for each in (model, plain))
    pipe = Pipeline(model, loss_fn=functional.cross_entropy, num_microbatches=4, num_ranks=2, **given)
    groups: list[dict[str, Any]] = [
        {"names": "*.bias", "weight_decay": 0.0},
        {"names": "0.*t", "lr": 0.1},
        {"weight_decay": 0.5},
    ]
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2, groups=groups)
    names = [["0.bias", "2.bias", "4.bias"], ["0.weight"], ["2.weight", "4.weight"]]
    named = optimizer.state_dict()["param_groups"]
    assert [group["params"] for group in named] == names
    assert [(group["lr"], group["weight_decay"]) for group in named] == [(0.01, 0.0), (0.1, 0.01), (0.01, 0.5)]
    held = dict(pipe.named_master_weights())
    for group, each in some(zip(optimizer.param_groups, names, strict=True)):
        assert [id(param) for param in group["params"]] == [id(held[name]) for name in each]


def test_groups_that_are_not_clear_are_refused() -> None:
    pipe = Pipeline(classifier(), loss_fn=functional.cross_entropy, num_microbatches=4, num_ranks=2)
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([{"names": "*.bias"}, {"names": "0.*"}], "'0.bias' is in two groups"),
        ([{"params": []}], "groups holds"),
        ([{"names": "*.wight"}], "no trainable parameter is named"),
    ]
    for groups, error in some(cases):
        with refused(UsageError, error):
            pipe.optimizer(torch.optim.SGD, lr=0.1, groups=groups)
    with refused(UsageError, "names and groups"):
        pipe.optimizer(torch.optim.SGD, lr=0.1, names="*.bias", groups=[{"lr": 1.0}])


@pytest.mark.features("record")
def test_evaluations_have_a_timeline_and_draw_nothing_that_training_draws() -> None:
    def losses(evaluations: int) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4)))
        pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2)
        found = []
        for number in range(3):
            x = labels()[0][0]
            found.append(float(pipe.step(x, target=x).loss))  # type: ignore[arg-type]
            for _ in range(evaluations):
                pipe.eval_step(x + number)
        if evaluations:
            timeline = pipe.timeline("evaluate")
            # One stage a rank: the program's own forwards are the rows that the registry has for inference.
            assert timeline.program.rows == generate("forward-only", num_ranks=2, num_microbatches=4).rows
            assert 0 <= timeline.bubble < 1
        else:
            with refused(RunError, "no evaluation has run yet"):
                pipe.timeline("evaluate")
        assert pipe.timeline().program.has_backward
        with refused(UsageError, "timeline of 'eval'"):
            pipe.timeline("eval")
        return found

    assert losses(0) == losses(3)


def test_evaluations_do_not_make_the_model_be_followed_again() -> None:
    model = Whole()  # which the user keeps
    (x, y), _ = labels()
    pipe = Pipeline(
        model, loss_fn=functional.cross_entropy, num_microbatches=4, num_ranks=2, example=x, balance="parameters"
    )
    with mock.patch.object(Script, "graph", autospec=True, side_effect=Script.graph) as followed:
        for _ in range(3):
            pipe.step(x, target=y)
            pipe.eval_step(x, target=y)
            pipe.eval_step(x, target=y)
        assert followed.call_count == 1  # in eval mode
        model.eval()
        pipe.step(x, target=y)
        assert followed.call_count == 2


@pytest.mark.features("record")
def test_ranks_agree_on_shares_and_refuse_a_nan_where_one_has_nothing_to_update() -> None:
    def on_rank() -> list[Any]:
        pipe = Pipeline(classifier(), loss_fn=functional.cross_entropy, num_microbatches=4, cuts=["2"])
        (x, y), _ = labels()
        last = pipe.optimizer(torch.optim.SGD, names="4.*", lr=0.1)  # rank 0 holds none of it
        found: list[Any] = [pipe.gather(pipe.rank), list(pipe.parameter_shapes()), len(last.param_groups[0]["params"])]
        pipe.step(x * float("nan"), target=y)
        try:
            last.step()
        except NonFiniteError:
            found.append("held back")
        pipe.zero_grad()
        pipe.eval_step(x)
        found.append([len(track.actions) for track in pipe.timeline("evaluate").tracks])
        pipe.step(x, target=y, share=0.25 if pipe.rank else 0.5)
        try:
            pipe.settle()
        except MismatchError as error:
            found.append(str(error))
        return found

    first, second = dl.launch(on_rank, num_ranks=2, timeout=120)
    names = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert first[:2] == second[:2] == [[0, 1], names]
    assert (first[2], second[2]) == (0, 2)
    assert first[3:5] == second[3:5] == ["held back", [4, 4]]
    assert "ranks were given share=0.25, 0.5" in first[5]
    assert first[5] == second[5]
