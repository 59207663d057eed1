"""Schedules that split backwards, over a frozen base: stages that train adapters alone run B, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.action import Op
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.prove.whole import join
from drumline.core.rules import Backward
from drumline.engine.stages.balance import balance
from drumline.pipeline.pipeline import Pipeline
from drumline.schedules import schedules
from matrices import some_of
from torch_models import TWO_WAYS, WIDTH, Reference, data, programs

pytestmark = pytest.mark.torch

NAMES = [name for name, schedule in schedules().items() if schedule.splits_backward]
SPLIT = some_of(NAMES, ("zb-h1", "zb-v", "interleaved-zb", "dualpipe"))
FROZEN = ((), (0, 1, 2, 3), (4, 5, 6, 7))  # blocks without adapters that train
INSIDE = 64


class Adapted(nn.Module):
    """A frozen feed-forward block with adapters of rank 1, 3% of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INSIDE), nn.Linear(INSIDE, WIDTH)
        self.requires_grad_(False)
        self.first, self.second = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(functional.gelu(self.up(x))) + self.second(self.first(x))
        return made


def adapted(num_blocks: int = 8, *, frozen: tuple[int, ...] = (), head: bool = False) -> nn.Sequential:
    """Return blocks with adapters, of which some have none that train; the last block may train as a whole."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Adapted() for _ in range(num_blocks)))
    for block in frozen:
        model[block].requires_grad_(False)
    if head:
        model[-1].requires_grad_(True)
    return model


def pipeline(model: nn.Sequential, schedule: Program | str, **settings: Any) -> Pipeline:
    plain: dict[str, Any] = {"loss_fn": functional.mse_loss, "balance": "even", "num_microbatches": 8}
    return Pipeline(model, schedule=schedule, **{**plain, **settings})


def split_stages(program: Program) -> set[int]:
    return {part.stage for part in program.work() if part.op is Op.BACKWARD_WEIGHT}


def test_the_block_trains_a_light_share() -> None:
    sizes = [(param.numel(), param.requires_grad) for param in Adapted().parameters()]
    assert 0.01 < sum(size for size, trains in sizes if trains) / sum(size for size, _ in sizes) < 0.05


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_are_those_of_a_plain_loop_with_whole_and_with_split_backwards(name: str) -> None:
    (program,) = programs(name, 2, (8,))
    batch, target = data(16)
    whole = join(program, [True] * program.num_stages)
    for frozen, schedule in [*((frozen, name) for frozen in FROZEN), ((), program)]:
        model = adapted(frozen=frozen)
        reference = Reference(model, program, functional.mse_loss, balance="even")
        pipe = pipeline(model, schedule, num_ranks=2)
        result = pipe.step(batch, target=target)
        assert result.loss is not None
        assert torch.equal(result.loss, reference.step(batch, target))
        reference.compare(pipe, exact=name not in TWO_WAYS)
        trained = [any(block.trains for block in stage) for stage in reference.cuts]
        # What a user wrote runs as it is.
        assert pipe.program == (program if schedule is program else prune(whole, trained))
        assert split_stages(pipe.program) == (split_stages(program) if schedule is program else set())
        pipe.settle()


def test_a_stage_that_trains_more_keeps_its_split_backward_and_layers_that_move_change_it() -> None:
    model, (batch, target) = adapted(6, head=True), data(8)
    pipe = pipeline(model, "zb-h1", num_ranks=2, num_microbatches=4, balance=[3, 3])
    assert split_stages(pipe.program) == {1}
    reference = Reference(model, pipe.program, functional.mse_loss, balance=[3, 3])
    pipe.step(batch, target=target)
    reference.step(batch, target)
    reference.compare(pipe, exact=True)
    model = adapted(40, head=True)
    pipe = pipeline(model, "zb-h1", num_ranks=2, num_microbatches=4, balance=[10, 30])
    assert split_stages(pipe.program) == set()  # a thirtieth of the weights, and the adapters of the others
    reference = Reference(model, pipe.program, functional.mse_loss, balance=[10, 30])
    pipe.step(batch, target=target)
    reference.step(batch, target)
    pipe.settle()
    pipe.repartition(balance=[30, 10])
    assert split_stages(pipe.program) == {1}
    model.zero_grad()
    reference.model.zero_grad()
    pipe.step(batch, target=target)
    reference.step(batch, target)
    reference.compare(pipe, exact=True)


def test_the_first_schedule_of_auto_splits_nothing_either() -> None:
    model, (batch, target) = adapted(4), data(8)
    pipe = pipeline(model, "auto", num_ranks=2, num_microbatches=4)
    assert pipe.program == programs("1f1b", 2, (4,))[0]
    for _ in range(9):
        pipe.step(batch, target=target)
    assert split_stages(pipe.program) == set()


def test_a_measured_cut_counts_whole_backwards() -> None:
    x = torch.randn(16, WIDTH)
    settings: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "num_ranks": 2, "num_runs": 1}
    found = balance(adapted(), x, target=x, schedule="zb-h1", **settings)
    assert split_stages(found.program) == set()
    assert found.program.backwards == (Backward.WHOLE, Backward.WHOLE)
    (program,) = programs("zb-h1", 2, (4,))
    assert split_stages(balance(adapted(), x, target=x, schedule=program, **settings).program) == {0, 1}
    full = adapted().requires_grad_(True)
    assert split_stages(balance(full, x, target=x, schedule="zb-h1", **settings).program) == {0, 1}
