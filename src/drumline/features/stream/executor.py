"""Run a rank's row of a schedule without a flush: one slice per step, with updates inside.

    step t       slice t of the row: F of step t; B and UPDATE of step t and of those before
    pause        B of all microbatches in flight, on all ranks: nothing is in flight, and no update was made early
    drain        the same, then all updates that are due

After a pause the next slices skip the backwards that have run, and make their updates where they always are. So a pause
changes no number: evaluations and checkpoints do not disturb training. After a drain the stream begins again.

Each of the three is a list of jobs for the executor's loop. A cell of a slice becomes these:

    0B1        post 0RECV_B1 ── compute 0B1, with the weights of 0F1 ── send 0SEND_B1 ── close the update that it ends
    0UPDATE1   agree with the other ranks ── update

A job of an earlier step finds that step's data by itself, and tells the channel that its messages belong to it.

Gradients add up in `.grad` while a slice runs. With the last microbatch of an update they move to `pending`, and with
the UPDATE to the optimizer, unless they are not finite. Gradients of the next update wait separately meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.channel.channel import Wait
from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.rules import Backward
from drumline.features.stream.rows import BACKWARDS, Cell, StreamRows, runs
from drumline.features.stream.verdicts import Optimizers, Place, UpdateVerdict, Verdicts
from drumline.features.stream.versions import Versions
from drumline.model.patches import having_gradients
from drumline.runtime.draft import BEGIN, Clock, Draft
from drumline.runtime.execute.executor import Executor, Gradients
from drumline.runtime.execute.jobs import Job
from drumline.runtime.gradients.clip import all_finite
from drumline.runtime.gradients.exchange import Ending
from drumline.runtime.step import Step

_BETWEEN_STEPS = -2  # a pause belongs to no step


@dataclass(slots=True)
class Group:
    """The gradients of one update that is due, and the settings that it is made with."""

    gradients: dict[nn.Parameter, Tensor]
    settings: Any
    is_summed: bool = False  # whether gradients of tied parameters have those of other ranks
    is_finite: bool = True  # whether they and the losses are, on this rank
    is_told: bool = False  # whether other ranks know that, and the gradients' norms
    judged: UpdateVerdict | None = None  # what all ranks said


class StreamExecutor(Executor):
    """One rank's stage and its endless row; give it `stream` and `optimizers` before it runs."""

    stream: StreamRows
    optimizers: Optimizers
    check_finite = True

    def attach(self, stream: StreamRows, optimizers: Optimizers, *, check_finite: bool, together: bool) -> None:
        """Run these rows, and step these optimizers; `together` if all ranks make an update at the same place."""
        self.stream, self.optimizers, self.check_finite = stream, optimizers, check_finite
        self.verdicts = Verdicts(
            self.channel, self.rank, stream.ends, optimizers, check_finite=check_finite, together=together
        )
        rows = [cell.op for each in stream.slices for cell in each[self.rank]]
        self._updates = Op.UPDATE in rows  # else its stage is frozen
        self._closes = BACKWARDS if any(op in rows for op in BACKWARDS) else (Op.FORWARD,)
        self.versions = {index: Versions(stage) for index, stage in self.stages.items()}
        self._cached: dict[tuple[int, int], list[Job]] = {}
        self.restart()

    def restart(self) -> None:
        """Begin the stream again, with nothing in flight and no update due."""
        self.go_on(0)
        self.pending: dict[Place, Group] = {}
        self._steps: dict[int, tuple[Step, Any]] = {}  # by position, with the optimizers' settings
        self._partial: dict[nn.Parameter, Tensor] = {}
        for index, versions in self.versions.items():
            versions.clear()
            self.stages[index].passes.clear()
        self._outputs.clear()
        self._gradients.clear()
        self.arrived.clear()

    def go_on(self, position: int) -> None:
        """Have the next step at a position, with nothing in flight."""
        self.position = position  # of the next step
        self.since = 0  # how many of the steps before it began after the stream was last empty
        self.verdicts.begin(position)

    def translated(self) -> list[Job]:
        """Return no jobs: those of a step depend on its slice."""
        return []

    @property
    def in_flight(self) -> int:
        """How many microbatches have run forward and not backward."""
        return sum(len(stage.passes) for stage in self.stages.values())

    def run(self, step: Step, draft: Draft, jobs: Iterable[Job]) -> Generator[Wait, None, None]:
        """Run the slice of a step."""
        self._steps[self.position] = step, self.optimizers.settings()
        self.verdicts.number(self.position, step.draw)
        yield from super().run(step, draft, self._slice())
        self.position += 1
        self.since += 1
        for position in [number for number in self._steps if number < self.position - self.stream.num_back]:
            del self._steps[position]

    def pause(self, draft: Draft) -> Generator[Wait, None, None]:
        """Run the backwards of all microbatches in flight; all ranks call it alike."""
        yield from self._between_steps(draft, self._pausing())

    def drain(self, draft: Draft) -> Generator[Wait, None, None]:
        """Run the backwards in flight and make all updates that are due; the stream begins again."""
        yield from self._between_steps(draft, self._draining())
        self.restart()

    def _between_steps(self, draft: Draft, jobs: Iterable[Job]) -> Generator[Wait, None, None]:
        yield from super().run(Step(_BETWEEN_STEPS), draft, jobs)
        self.since = 0
        assert not self._partial, "gradients of a step that is not over"

    def _begin(self, step: Step, draft: Draft) -> None:
        """Begin with what is in flight, and with the gradients that have begun to add up."""
        self.draft = draft
        open_steps = [earlier.number for earlier, _ in self._steps.values()]
        self.channel.begin(step.number, since=min([step.number, *open_steps]))
        self.clock.begin(draft)
        self.exchange.begin()
        for earlier in self._parameters():
            earlier.grad = self._partial.pop(earlier, None)
        for index, stage in self.stages.items():
            stage.refresh()
            stage.outputs = step.outputs if step.wants_outputs else None
            self.versions[index].scale = self.scale
        draft.spent(BEGIN, draft.begin_ns, self.clock.now())

    def _endings(self) -> Sequence[Ending]:
        return [self._put_aside]

    def _put_aside(self, clock: Clock, draft: Draft) -> Iterable[Wait]:
        """Set aside the gradients that have begun to add up."""
        for param in self._parameters():
            if param.grad is not None:
                self._partial[param] = param.grad
                param.grad = None
        return ()

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def _slice(self) -> list[Job]:
        """Return the jobs of the next step."""
        kind = self.stream.kind(self.position, self.since)
        if kind not in self._cached:
            cells = self.stream.slice(self.position)[self.rank]
            jobs = [job for cell in cells if runs(cell, self.since) for job in self._jobs_of(cell)]
            self._cached[kind] = [*jobs, self._deciding(self.stream.num_back)]
        return self._cached[kind]

    def _pausing(self) -> Iterator[Job]:
        """Yield the jobs of a pause; only after the backwards is it known which updates are due."""
        for index, stage in self.stages.items():
            op = Op.BACKWARD if self.program.backwards[index] is Backward.WHOLE else Op.BACKWARD_INPUT
            for key in sorted(stage.passes):
                position, microbatch = self._unkeyed(key)
                yield from self._jobs_of(Cell(op, index, self.position - position, microbatch))
        for cell in self._due():
            yield self._agreeing(cell)
        yield self._deciding(0)

    def _draining(self) -> Iterator[Job]:
        """Yield the jobs of a drain."""
        yield from self._pausing()
        for cell in self._due():
            yield from self._jobs_of(cell)

    def _due(self) -> list[Cell]:
        """Return the updates that are due."""
        return [
            Cell(Op.UPDATE, self._stage, self.position - position, microbatch)
            for position, microbatch in sorted(self.pending)
        ]

    def _jobs_of(self, cell: Cell) -> Iterator[Job]:
        """Yield the jobs of a cell."""
        action = _action(cell)
        if cell.op is Op.UPDATE:
            yield self._agreeing(cell)
            yield Job(action, timed=True, call=partial(self._update, cell))
            return
        needs = tuple(self._needs(action))
        for receive, source in needs:
            yield Job(receive, partial(self._post_of, cell), other=source)
        yield self._computing(cell, needs)
        message = rules.message(action, self.program.num_stages)
        if message is not None and (cell.op is Op.FORWARD or cell.stage > self.lowest):
            run = partial(self._send_of, cell)
            yield Job(message.send, run, microbatch=cell.microbatch, other=self._other(message.send))
        if cell.op in self._closes and cell.microbatch in self.stream.ends:
            yield Job(action, partial(self._close, cell))

    def _computing(self, cell: Cell, needs: tuple[tuple[Action, int], ...]) -> Job:
        """Return the job of a forward or backward."""
        job = Job(_action(cell), stage=self.stages[cell.stage], microbatch=cell.microbatch, needs=needs, timed=True)
        if cell.op is Op.FORWARD:
            take, call, job.put = self._inputs, self._forward, self._keep_output
        else:
            take, call, job.put = self._gradients_of, self._backward, self._keep_gradients
        job.take, job.call = partial(self._take_of, cell, take), partial(call, cell)
        return job

    def _agreeing(self, cell: Cell) -> Job:
        """Return a job that waits until ranks agree on an update."""
        return Job(_action(cell), partial(self._agree, cell), waits=True)

    def _deciding(self, back: int) -> Job:
        """Return a job that learns the outcome of all steps more than `back` steps before this one."""
        return Job(Action(self._stage, Op.UPDATE), partial(self._decide, back), waits=True)

    def _decide(self, back: int, job: Job, step: Step) -> Generator[Wait, None, None]:
        return self.verdicts.decide(self.position - back, self._stage)

    def _place(self, cell: Cell) -> Place:
        return self.position - cell.back, cell.microbatch

    def _step_of(self, cell: Cell) -> Step:
        """Return the step that a cell's microbatch belongs to."""
        return self._steps[self.position - cell.back][0]

    def _post_of(self, cell: Cell, job: Job, _: Step) -> None:
        step = self._step_of(cell)
        self.channel.belongs(step.number)
        self._post(job, step)

    def _send_of(self, cell: Cell, job: Job, _: Step) -> None:
        step = self._step_of(cell)
        self.channel.belongs(step.number)
        self._send(job, step)
        self.draft.renumber("sends", self.stream.shown(cell))

    def _take_of(self, cell: Cell, take: Callable[[Job, Step], Any], job: Job, _: Step) -> Any:
        """Return what a forward or backward computes with; it draws the random numbers of its own step."""
        step = self._step_of(cell)
        self.stages[cell.stage].randomness.step = step.draw
        if job.needs:
            self.draft.renumber("messages", self.stream.shown(cell))
        return take(job, step)

    def _forward(self, cell: Cell, microbatch: int, *arguments: Any) -> Any:
        """Run a forward with the newest version."""
        stage, versions, key = self.stages[cell.stage], self.versions[cell.stage], self._key(cell)
        with versions.forward(key):
            output = stage.forward(microbatch, *arguments)
        self.draft.versions.append(versions.of(key))
        if microbatch in stage.passes:
            stage.passes[key] = stage.passes.pop(microbatch)
        else:
            versions.let_go(key)  # a frozen stage
        return output

    def _backward(self, cell: Cell, microbatch: int, *arguments: Any) -> Any:
        """Run a backward with the version that its forward used."""
        stage, versions, key = self.stages[cell.stage], self.versions[cell.stage], self._key(cell)
        self.draft.versions.append(versions.of(key))
        stage.passes[microbatch] = stage.passes.pop(key)
        with versions.backward(key):
            return stage.backward(microbatch, *arguments)

    def _gradients_of(self, job: Job, step: Step) -> tuple[Gradients]:
        """Return the gradients of a stage's output; a microbatch's loss counts by its share of its update."""
        if job.action.stage < self.program.num_stages - 1:
            return super()._gradients_of(job, step)
        return ((self._share(step, job.microbatch).to(step.losses[job.microbatch].dtype),),)

    def _share(self, step: Step, microbatch: int) -> Tensor:
        if len(self.stream.ends) == 1:
            return step.shares[microbatch]  # an update takes in the whole step
        total = torch.stack([step.shares[number] for number in self._with(microbatch)]).sum()
        share = step.shares[microbatch]
        return torch.where(total > 0, share / total, torch.zeros_like(share))

    def _with(self, microbatch: int) -> range:
        """Return the microbatches of the update that takes in this one."""
        ends = self.stream.ends
        return range(max((end + 1 for end in ends if end < microbatch), default=0),
                     min(end for end in ends if end >= microbatch) + 1)  # fmt: skip

    def _key(self, cell: Cell) -> int:
        """Return the number of a cell's microbatch in its stage: other than those that the stage itself counts."""
        position, microbatch = self._place(cell)
        return (position + 1) * self.stream.num_microbatches + microbatch

    def _unkeyed(self, key: int) -> Place:
        position, microbatch = divmod(key, self.stream.num_microbatches)
        return position - 1, microbatch

    # ---- gradients and updates ---------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.stages.values():
            yield from stage.parameters

    @property
    def _stage(self) -> int:
        return min(self.stages)

    def _close(self, cell: Cell, job: Job, _: Step) -> None:
        """Set aside the gradients of an update, which are complete on this rank."""
        position, microbatch = self._place(cell)
        step, settings = self._steps[position]
        if self.exchange.has_ties:
            self.channel.belongs(step.number)
            self.exchange.offer_tied(microbatch)
        gradients = {param: param.grad for param in self._parameters() if param.grad is not None}
        for param in gradients:
            param.grad = None
        group = Group(gradients, settings, is_summed=not self.exchange.has_ties or not self._updates)
        losses = [step.losses[number] for number in self._with(microbatch) if number in step.losses]
        group.is_finite = not self.check_finite or bool(all_finite([*gradients.values(), *losses]))
        if group.is_summed:
            self._tell(group, position, microbatch)
        if self._updates:
            self.pending[position, microbatch] = group

    def _sum(self, group: Group, position: int, microbatch: int) -> Generator[Wait, None, None]:
        """Add the gradients of other ranks to those of tied parameters."""
        with having_gradients(self._parameters(), group.gradients) as parameters:
            self.channel.belongs(self._steps[position][0].number)
            yield from self.exchange.sum_tied(self.clock, self.draft, self.clock.now(), microbatch)
            group.gradients = {param: param.grad for param in parameters if param.grad is not None}
        group.is_summed = True
        if self.check_finite and group.is_finite:  # sums may be too large
            group.is_finite = bool(all_finite(list(group.gradients.values())))
        self._tell(group, position, microbatch)

    def _tell(self, group: Group, position: int, microbatch: int) -> None:
        """Tell all ranks about the gradients of an update on this one."""
        with having_gradients(self._parameters(), group.gradients):
            self.verdicts.tell((position, microbatch), is_finite=group.is_finite)
        group.is_told = True

    def _judge(self, group: Group, position: int, microbatch: int) -> Generator[Wait, None, None]:
        """Hear what all ranks say about an update, if all make it at the same place."""
        if group.judged is None and self.verdicts.together and self.verdicts.is_on:
            if not group.is_told:  # it comes from a checkpoint
                self._tell(group, position, microbatch)
            group.judged = yield from self.verdicts.hear((position, microbatch), self._stage)

    def _agree(self, cell: Cell, job: Job, _: Step) -> Generator[Wait, None, None]:
        """Make an update ready: sum the gradients of tied parameters, and hear what all ranks say about it."""
        place = self._place(cell)
        group = self.pending[place]
        if not group.is_summed:
            yield from self._sum(group, *place)
        yield from self._judge(group, *place)

    def _update(self, cell: Cell, _: int) -> None:
        """Make an update of the stage, or leave it out; it counts as a version either way."""
        group = self.pending.pop(self._place(cell))
        judged, versions = group.judged, self.versions[cell.stage]
        if judged.bad if judged is not None else not group.is_finite:
            versions.update([])
        else:
            with having_gradients(self._parameters(), group.gradients) as parameters:
                changing = [param for param in parameters if param.grad is not None]
                if judged is not None and judged.norm is not None:
                    self.optimizers.clip(judged.norm, changing)
                self.optimizers.update(changing, group.settings, versions.update)
        self.draft.versions.append(versions.number)


def _action(cell: Cell) -> Action:
    """Return a cell as an action of its own step."""
    return Action(cell.stage, cell.op, cell.microbatch)
