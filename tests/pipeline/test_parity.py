"""Every schedule gives one process's loss and gradients, over the strict channel in one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.channel.channel import Channel, Delivery
from drumline.core.action import Action
from drumline.core.simulate.simulate import simulate
from drumline.pipeline.pipeline import Pipeline
from matrices import KINDS, chosen, matrix, some_of
from some import some
from torch_models import SYNCHRONOUS, TWO_WAYS, Reference, data, mlp, programs

pytestmark = pytest.mark.torch


def test_every_synchronous_schedule_of_the_registry_is_tried() -> None:
    from drumline.schedules import schedules

    assert set(SYNCHRONOUS) == set(schedules()) - {"pipedream", "pipedream-2bw", "forward-only"}


SETTINGS = (("none", 0.0), ("none", 0.3), ("full", 0.3), (("1", "2", "6"), 0.3))  # checkpoint, dropout


@matrix("name, num_ranks", SYNCHRONOUS, (4, 3, 2, 1), times=1)
def test_loss_and_gradients_are_those_of_one_process(name: str, num_ranks: int) -> None:
    batch, target = data(11)
    turned = SETTINGS[num_ranks % 4 :] + SETTINGS[: num_ranks % 4]  # each number of ranks in other company
    cases = chosen(programs(name, num_ranks, (8, 3, 1)), turned, times=1)
    if not cases:
        assert name in TWO_WAYS
        assert num_ranks % 2
        return
    for program, (checkpoint, dropout) in some(cases):
        model = mlp(dropout=dropout)
        reference = Reference(model, program, functional.mse_loss)
        pipe = Pipeline(
            model, loss_fn=functional.mse_loss, schedule=program, num_ranks=num_ranks, checkpoint=checkpoint
        )
        result = pipe.step(batch, target=target)
        assert result.loss is not None
        assert torch.equal(result.loss, reference.step(batch, target))
        reference.compare(pipe, exact=name not in TWO_WAYS)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-zb", "dualpipe", "chimera"])
def test_parameters_follow_one_process_over_several_optimizer_steps(name: str) -> None:
    for program in programs(name, 4, (4, 8)):
        model = mlp(dropout=0.2)
        reference = Reference(model, program, functional.mse_loss)
        pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, num_ranks=4)
        ours = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
        theirs = torch.optim.AdamW(reference.model.parameters(), lr=1e-2)
        for step in range(4):
            batch, target = data(9 + step, seed=step)  # another size every step
            result = pipe.step(batch, target=target)
            loss = reference.step(batch, target)
            norm = pipe.clip_grad_norm_(0.1)
            expected = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
            assert result.loss is not None
            if name in TWO_WAYS:
                torch.testing.assert_close(result.loss, loss)
                torch.testing.assert_close(norm, expected)
            else:
                assert torch.equal(result.loss, loss)
                assert torch.equal(norm, expected)
                reference.compare(pipe, exact=True)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        wanted = dict(reference.model.named_parameters())
        copies: dict[str, torch.Tensor] = {}
        for parameter_name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter, wanted[parameter_name])
            assert torch.equal(copies.setdefault(parameter_name, parameter), parameter), "two copies drifted apart"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_gradients_of_several_steps_add_up(name: str) -> None:
    (program,) = programs(name, 2, (4,))
    model = mlp()
    reference = Reference(model, program, functional.mse_loss)
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, num_ranks=2)
    for step in range(3):
        batch, target = data(8, seed=step)
        pipe.step(batch, target=target)
        reference.step(batch, target)
    reference.compare(pipe, exact=name != "dualpipe")


@pytest.mark.features("record")
@pytest.mark.matrix
@pytest.mark.parametrize("name", some_of(SYNCHRONOUS, KINDS))
def test_held_pairs_are_the_simulators_at_every_action(name: str) -> None:
    for num_ranks in (2, 4):
        for program in programs(name, num_ranks, (3, 8)):
            pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, schedule=program, num_ranks=num_ranks)
            batch, target = data(8)
            pipe.step(batch, target=target)
            simulated = [tuple(after for _, after in holding.pairs) for holding in simulate(program).memory]
            assert list(pipe.timeline().held) == simulated


def watch_open_receives(channel: Channel) -> list[int]:
    """Return a list that gets, at every post, how many receives of its edge are open: posted and not taken up."""
    found: list[int] = []
    num_open: Counter[int] = Counter()
    post, take = channel.post, channel.take

    def posted(receive: Action, source: int) -> None:
        num_open[source] += 1
        found.append(num_open[source])
        post(receive, source)

    def taken(receive: Action, source: int) -> Delivery | None:
        delivery = take(receive, source)
        num_open[source] -= delivery is not None
        return delivery

    vars(channel).update(post=posted, take=taken)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", some_of(SYNCHRONOUS, KINDS))
def test_no_more_receives_are_open_than_was_allowed(name: str) -> None:
    for ahead in (1, 3):
        for program in programs(name, 4, (8,)):
            pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, schedule=program, num_ranks=4, ahead=ahead)
            num_open = [watch_open_receives(channel) for channel in pipe._crew.channels]
            batch, target = data(8)
            pipe.step(batch, target=target)
            # A receive is posted earlier than the bound asks where its edge's order forces it; dualpipe's does so.
            assert all(0 < max(each) <= 8 for each in num_open)
            if name in ("1f1b", "gpipe", "zb-h1"):
                assert max(map(max, num_open)) <= ahead


def test_uneven_cuts_give_the_same_gradients() -> None:
    (program,) = programs("zb-h1", 3, (5,))
    model = mlp()
    reference = Reference(model, program, functional.mse_loss, balance=[1, 5, 2])
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, num_ranks=3, balance=[1, 5, 2])
    batch, target = data(7)
    pipe.step(batch, target=target)
    reference.step(batch, target)
    reference.compare(pipe, exact=True)


def test_merged_weight_gradients_agree_up_to_rounding() -> None:
    for name in ("zb-h1", "zb-v", "interleaved-zb"):
        (program,) = programs(name, 2, (8,))
        model = mlp()
        reference = Reference(model, program, functional.mse_loss)
        pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, num_ranks=2, merge_weight_gradients=True)
        batch, target = data(16)
        pipe.step(batch, target=target)
        reference.step(batch, target)
        reference.compare(pipe, exact=False)
