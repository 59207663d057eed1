"""The executor by itself: which jobs a row becomes, what it waits for, and what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.channel import Wait
from drumline.channel.in_process import Hub, take_turns
from drumline.core.action import Action, Op
from drumline.core.errors import ProgramError
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.model.block import Block
from drumline.model.randomness import Randomness
from drumline.runtime.draft import Draft, NoClock
from drumline.runtime.execute.executor import Executor
from drumline.runtime.execute.jobs import Job
from drumline.runtime.stage import Stage
from drumline.runtime.stash import Scale
from drumline.runtime.step import Step
from drumline.schedules import generate
from refused import refused
from some import some

pytestmark = pytest.mark.torch
WIDTH, MICROBATCHES = 3, 4


def layers(number: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(number)]


def executors(program: Program, model: list[nn.Linear], *, merge: bool = False) -> tuple[Hub, list[Executor]]:
    program = lower(program, ahead=2)
    hub = Hub(program.num_ranks)
    last = program.num_stages - 1
    made = []
    for channel in hub.channels():
        stages = {
            index: Stage(
                index,
                [Block(str(index), model[index])],
                Randomness(0, torch.device("cpu")),
                loss=functional.mse_loss if index == last else None,
                split=range(MICROBATCHES) if "I" in program.format() else (),
            )
            for index in program.placement.stages_of(channel.rank)
        }
        made.append(Executor(program, channel.rank, stages, channel, NoClock(), merge_weight_gradients=merge))
    return hub, made


def step_on(batch: Tensor, target: Tensor, *, train: bool = True) -> Step:
    return Step(
        0,
        inputs=batch.chunk(MICROBATCHES),
        targets=target.chunk(MICROBATCHES),
        shares=[torch.tensor(1 / MICROBATCHES)] * MICROBATCHES,
        train=train,
    )


def run(hub: Hub, made: list[Executor], step: Step) -> list[Draft]:
    drafts = [Draft(executor.rank) for executor in made]
    take_turns(hub, [executor.run(step, draft, executor.jobs) for executor, draft in zip(made, drafts, strict=True)])
    return drafts


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_a_row_computes_what_one_process_does_and_leaves_nothing_behind(schedule: str, merge: bool) -> None:
    program = generate(schedule, num_ranks=2, num_microbatches=MICROBATCHES)
    model = layers(program.num_stages)
    batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    loss = functional.mse_loss(nn.Sequential(*model)(batch), target)
    torch.autograd.backward(loss)
    expected = [param.grad for layer in model for param in layer.parameters()]
    for layer in model:
        layer.zero_grad()
    hub, made = executors(program, model, merge=merge)
    step = step_on(batch, target)
    run(hub, made, step)
    torch.testing.assert_close(torch.stack([step.losses[index] for index in range(MICROBATCHES)]).mean(), loss.detach())
    for param, gradient in zip((param for layer in model for param in layer.parameters()), expected, strict=True):
        torch.testing.assert_close(param.grad, gradient)
    for executor in some(made):
        assert not executor.arrived
        assert not executor._outputs
        assert not executor._gradients
        assert executor.current is None
        assert not any(stage.passes for stage in executor.stages.values())


def test_forwards_alone_return_outputs_and_losses() -> None:
    forwards = Program.parse("0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3")
    model = layers(2)
    batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    hub, made = executors(forwards, model)
    step = step_on(batch, target, train=False)
    step.wants_outputs = True
    run(hub, made, step)
    whole = nn.Sequential(*model)
    for at, (given, wanted) in enumerate(zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)):
        torch.testing.assert_close(step.outputs[at], whole(given))
        torch.testing.assert_close(step.losses[at], functional.mse_loss(whole(given), wanted))


def test_what_a_row_does_is_noted_action_by_action() -> None:
    program = generate("1f1b", num_ranks=2, num_microbatches=MICROBATCHES)
    hub, made = executors(program, layers(2))
    drafts = run(hub, made, step_on(torch.randn(8, WIDTH), torch.randn(8, WIDTH)))
    assert [len(draft.starts) for draft in drafts] == [2 * MICROBATCHES] * 2
    assert drafts[0].held == [1, 2, 1, 2, 1, 2, 1, 0]
    assert drafts[1].held == [1, 0] * MICROBATCHES


@pytest.mark.features("check")
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_witnesses_see_one_microbatchs_gradients_and_output_each(schedule: str, merge: bool) -> None:
    from drumline.features.check.gradients.witness import WatchedRank, Witness
    from drumline.features.check.units.units import Units

    program = generate(schedule, num_ranks=2, num_microbatches=MICROBATCHES)
    model = layers(2)
    batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    hub, unseen = executors(program, model, merge=merge)
    run(hub, unseen, step_on(batch, target))
    whole = [param.grad for layer in model for param in layer.parameters()]
    for layer in model:
        layer.zero_grad()
    hub, made = executors(program, model, merge=merge)
    ranks = [WatchedRank(executor, {}) for executor in made]
    for rank in ranks:
        rank.watch([Witness(Units(1)), Witness(Units(2))])
    run(hub, made, step_on(batch, target))
    for param, before in zip([param for layer in model for param in layer.parameters()], whole, strict=True):
        torch.testing.assert_close(param.grad, before, rtol=1e-6 if merge else 0, atol=1e-6 if merge else 0)
    for at, microbatch in enumerate([1, 2]):
        for layer in model:
            layer.zero_grad()
        output = nn.Sequential(*model)(batch.chunk(MICROBATCHES)[microbatch])
        torch.autograd.backward(functional.mse_loss(output, target.chunk(MICROBATCHES)[microbatch]) / MICROBATCHES)
        for rank, layer in some(zip(ranks, model, strict=True)):
            for param in layer.parameters():
                torch.testing.assert_close(rank.witnesses[at].gradients[param], param.grad)
        torch.testing.assert_close(ranks[1].witnesses[at].outputs[microbatch], output.detach())


@pytest.mark.parametrize("weigh", [False, True])
def test_pairs_that_take_turns_run_forwards_in_a_thread_and_compute_the_same(weigh: bool) -> None:
    program = generate("dualpipe-v", num_ranks=2, num_microbatches=MICROBATCHES)
    model = layers(program.num_stages)
    batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    hub, plain = executors(program, model)
    run(hub, plain, step_on(batch, target))
    expected = [param.grad for layer in model for param in layer.parameters()]
    threads: list[threading.Thread] = []
    for layer in model:
        layer.zero_grad()
        layer.register_forward_hook(lambda *_: threads.append(threading.current_thread()))
    hub, made = executors(program, model)
    for executor in made:
        executor.takes_turns = True
        executor.scale = Scale(executor.stages.values()) if weigh else None
        executor.replace_jobs()
    drafts = run(hub, made, step_on(batch, target))
    for param, gradient in zip((param for layer in model for param in layer.parameters()), expected, strict=True):
        torch.testing.assert_close(param.grad, gradient, rtol=0, atol=0)
    pairs = sum(action.op is Op.OVERLAP for row in program.rows for action in row)
    assert sum(thread is not threading.main_thread() for thread in threads) == pairs > 0
    for draft in some(drafts):
        assert len(draft.stash) == len(draft.peaks) == (len(draft.starts) if weigh else 0)


def test_a_job_that_waits_stops_the_row_where_it_is() -> None:
    _, (executor,) = executors(Program.parse("0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3"), layers(1))
    action, draft = Action.parse("0REDUCE_GRAD"), Draft(0)
    wait, noted = Wait(0, action, action, 1), []

    def waits(job: Job, step: Step) -> Iterator[Wait]:
        noted.append(len(draft.starts))
        yield wait
        yield wait
        noted.append(len(draft.starts))

    jobs = [*executor.jobs[:2], Job(action, waits, waits=True), *executor.jobs[2:]]
    running = executor.run(step_on(torch.randn(8, WIDTH), torch.randn(8, WIDTH)), draft, jobs)
    assert next(running) is wait
    assert executor.current == action
    assert list(running) == [wait]
    assert noted == [2, 2]
    assert len(draft.starts) == 2 * MICROBATCHES


def test_an_action_that_no_row_of_ours_has_is_refused_by_name() -> None:
    program = Program.parse("0F0,0B0,0UPDATE0")
    with refused(ProgramError, "rank 0's row has 0UPDATE0"):
        Executor(program, 0, {}, Hub(1).channels()[0], NoClock())
