"""Run a rank's row of a schedule without a flush: one slice per step, with updates inside.

    step t       slice t of the row: F of step t; B and UPDATE of step t and of those before
    pause        B of all microbatches in flight, on all ranks: nothing is in flight, and no update was made early
    drain        the same, then all updates that are due

After a pause the next slices skip the backwards that have run, and make their updates where they always are. So a pause
changes no number: evaluations and checkpoints do not disturb training. After a drain the stream begins again.

Gradients add up in `.grad` while a slice runs. With the last microbatch of an update they move to `pending`, and with
the UPDATE to the optimizer; what has begun to add up for the next update waits aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drumline.core.action import Action, Op
from drumline.core.errors import NonFiniteError
from drumline.core.rules import Backward
from drumline.runtime.channel.channel import Wait
from drumline.runtime.draft import BEGIN, NOTE, Draft
from drumline.runtime.executor import Executor, Gradients, Job, Step
from drumline.runtime.gradients.clip import all_finite
from drumline.runtime.stream.rows import BACKWARDS, Cell, StreamRows, runs
from drumline.runtime.stream.versions import Versions

_BETWEEN_STEPS = -2  # a pause belongs to no step


class Stepping(Protocol):
    """The optimizers, as an executor sees them."""

    max_norm: float | None  # largest norm of all ranks' gradients in an update

    def norms(self, rank: int) -> dict[str, float]:
        """Return the norms of the gradients that a rank's own parameters have now, by name."""

    def clip(self, norms: list[dict[str, float]], parameters: list[nn.Parameter]) -> None:
        """Scale the gradients of these parameters, given the norms of all ranks."""

    def settings(self) -> Any:
        """Return the optimizers' settings now, such as learning rates: those of the step that begins."""

    def update(self, parameters: list[nn.Parameter], settings: Any, move: Callable[[list[nn.Parameter]], None]) -> None:
        """Update these parameters, which have gradients, by such settings; first `move` them to new memory."""


@dataclass(slots=True)
class Group:
    """The gradients of one update that is due, and the settings that it is made with."""

    gradients: dict[nn.Parameter, Tensor]
    settings: Any
    is_summed: bool = False  # whether gradients of tied parameters have those of other ranks
    is_told: bool = False  # whether other ranks know their norms


_NO_CELL, _NO_ACTION = Cell(Op.FORWARD, 0, 0, 0), Action(0, Op.FORWARD, 0)


@dataclass(slots=True)
class _SliceJob(Job):
    """A cell of a slice; `shown` is its action in the step's program, `target` the rank that gets what it makes."""

    cell: Cell = _NO_CELL
    shown: Action = _NO_ACTION
    sends: Action | None = None  # the message under which its result leaves
    target: int = -1


Place = tuple[int, int]  # of an update: the position of its step in the stream, and its last microbatch


class StreamExecutor(Executor):
    """One rank's stage and its endless row; give it `stream` and `optimizers` before it runs."""

    stream: StreamRows
    optimizers: Stepping
    check_finite = True

    def attach(self, stream: StreamRows, optimizers: Stepping, *, check_finite: bool) -> None:
        """Run these rows, and step these optimizers."""
        self.stream, self.optimizers, self.check_finite = stream, optimizers, check_finite
        self.versions = {index: Versions(stage) for index, stage in self.stages.items()}
        self._cached: dict[tuple[int, int], list[_SliceJob]] = {}
        self.num_begun = 0  # how often the stream began
        self.restart()

    def restart(self) -> None:
        """Begin the stream again, with nothing in flight and no update due."""
        self.num_begun += 1
        self.position = 0  # of the next step
        self.since = 0  # how many of the steps before it began after the stream was last empty
        self.pending: dict[Place, Group] = {}
        self._steps: dict[int, tuple[Step, Any]] = {}  # by position, with the optimizers' settings
        self._partial: dict[nn.Parameter, Tensor] = {}
        for index, versions in self.versions.items():
            versions.clear()
            self.stages[index].held.clear()
        self._made.clear()
        self._gradients.clear()
        self.arrived.clear()

    def translated(self) -> list[Job]:
        """Return no jobs: those of a step depend on its slice."""
        return []

    @property
    def in_flight(self) -> int:
        """How many microbatches have run forward and not backward."""
        return sum(len(stage.held) for stage in self.stages.values())

    def run(self, step: Step, draft: Draft, jobs: Any = None) -> Generator[Wait, None, None]:
        """Run the slice of a step."""
        self._steps[self.position] = step, self.optimizers.settings()
        oldest = self._steps[min(self._steps)][0].number
        self.channel.begin(step.number, since=oldest)
        self.clock.begin(draft)
        self._enter(draft)
        for stage in self.stages.values():
            stage.refresh()
            stage.kept = step.outputs if step.wants_outputs else None
        if self.scale is not None:
            self.scale.begin(*step.inputs, *step.targets)
        draft.spent(BEGIN, draft.begin_ns, self.clock.now())
        directly = False
        for job in self._jobs():
            yield from self._perform(job, directly)
            directly = not job.target >= 0
        self.position += 1
        self.since += 1
        self._leave()
        draft.end_ns = self.clock.now()

    def pause(self, draft: Draft) -> Generator[Wait, None, None]:
        """Run the backwards of all microbatches in flight; all ranks call it alike."""
        self.channel.begin(_BETWEEN_STEPS, since=_BETWEEN_STEPS)
        self._enter(draft)
        last = self.position - 1
        for index, stage in self.stages.items():
            op = Op.BACKWARD if self.program.backwards[index] is Backward.WHOLE else Op.BACKWARD_INPUT
            for key in sorted(stage.held):
                position, microbatch = self._unkeyed(key)
                cell = Cell(op, index, last - position, microbatch)
                yield from self._perform(self._job(cell), directly=False, ends_at=last)
        for (position, microbatch), group in sorted(self.pending.items()):
            if self.exchange.has_ties and not group.is_summed:
                yield from self._sum(group, position, microbatch)
        self.since = 0
        self._leave()
        assert not self._partial, "gradients of a step that is not over"

    def drain(self, draft: Draft) -> Generator[Wait, None, None]:
        """Run the backwards in flight and make all updates that are due; the stream begins again."""
        yield from self.pause(draft)
        self._enter(draft)
        for position, microbatch in sorted(self.pending):
            for index in self.stages:
                yield from self._update(Cell(Op.UPDATE, index, 0, microbatch), position)
        self._leave()
        self.restart()

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def _jobs(self) -> list[_SliceJob]:
        kind = self.stream.kind(self.position, self.since)
        if kind not in self._cached:
            cells = self.stream.slice(self.position)[self.rank]
            self._cached[kind] = [self._job(cell) for cell in cells if runs(cell, self.since)]
        return self._cached[kind]

    def _job(self, cell: Cell) -> _SliceJob:
        action, shown = Action(cell.stage, cell.op, cell.microbatch), self.stream.action(cell)
        job = _SliceJob(action, stage=self.stages[cell.stage], microbatch=cell.microbatch, cell=cell, shown=shown)
        if cell.op is Op.UPDATE:
            return job
        job.needs = tuple(self._needs(action))
        stage = cell.stage
        if cell.op is Op.FORWARD and stage < self.program.num_stages - 1:
            job.sends, to = Action(stage, Op.SEND_F, cell.microbatch), stage + 1
        elif cell.op is not Op.FORWARD and stage > self.lowest:
            job.sends, to = Action(stage, Op.SEND_B, cell.microbatch), stage - 1
        else:
            return job
        job.target = self.placement.rank_of(to, cell.microbatch)
        return job

    def _perform(self, job: _SliceJob, directly: bool, ends_at: int | None = None) -> Generator[Wait, None, None]:
        """Run one cell; `ends_at` is the position that its `back` counts from, if not that of the running step."""
        position = (self.position if ends_at is None else ends_at) - job.cell.back
        self.current = job.shown
        if job.cell.op is Op.UPDATE:
            yield from self._update(job.cell, position)
            return
        (step, _), now = self._steps[position], self.clock.now
        self.channel.belongs(step.number)
        for receive, source in job.needs:
            yield from self._receive(job, receive, source)
        start = self.clock.start(directly and not job.needs)
        if self.scale is None:
            version = self._compute(job, step, position)
        else:
            with self.scale.watching():
                version = self._compute(job, step, position)
        self._note(start, version)
        if job.sends is not None:
            begun = now()
            receive, tensors, form = self.message(Job(job.sends, microbatch=job.microbatch))
            self.channel.send(receive, job.target, tensors, form)
            shown = receive._replace(microbatch=job.shown.microbatch)
            self.draft.sent(shown, job.target, sum([one.nbytes for one in tensors]), begun, now())
        if job.cell.op in BACKWARDS and job.microbatch in self.stream.ends:
            self._close(position, job.microbatch)

    def _receive(self, job: _SliceJob, receive: Action, source: int) -> Generator[Wait, None, None]:
        """Wait for a message."""
        now = self.clock.now
        self.channel.post(receive, source)
        asked = since = now()
        delivery = self.channel.take(receive, source)
        if delivery is None:
            while delivery is None:
                yield Wait(self.rank, job.action, receive, source)
                asked = now()
                delivery = self.channel.take(receive, source)
            self.draft.waited(since, asked)
        self.arrived[receive] = delivery
        self.draft.took(receive._replace(microbatch=job.shown.microbatch), source, delivery, asked, now())

    def _compute(self, job: _SliceJob, step: Step, position: int) -> int:
        """Run a forward or backward, and return which version it used."""
        stage, microbatch = job.stage, job.microbatch
        assert stage is not None
        versions, key = self.versions[stage.index], self._key(position, microbatch)
        versions.scale = self.scale
        stage.randomness.step = step.draw  # which may be that of an earlier step
        if job.cell.op is Op.FORWARD:
            with versions.forward(key):
                made = stage.forward(microbatch, *self._inputs(job, step))
            version = versions.of(key)
            if microbatch in stage.held:
                stage.held[key] = stage.held.pop(microbatch)
            else:
                versions.let_go(key)  # a frozen stage
            self._keep_output(job, step, made)
            return version
        version = versions.of(key)
        stage.held[microbatch] = stage.held.pop(key)
        with versions.backward(key):
            made = stage.backward(microbatch, *self._gradients_of(job, step))
        self._keep_gradients(job, step, made)
        return version

    def _gradients_of(self, job: Job, step: Step) -> tuple[Gradients]:
        """Return the gradients of a stage's output; a microbatch's loss counts by its share of its update."""
        if job.action.stage < self.program.num_stages - 1:
            return super()._gradients_of(job, step)
        return ((self._share(step, job.microbatch).to(step.losses[job.microbatch].dtype),),)

    def _share(self, step: Step, microbatch: int) -> Tensor:
        ends = sorted(self.stream.ends)
        if len(ends) == 1:
            return step.shares[microbatch]  # an update takes in the whole step
        last = next(end for end in ends if end >= microbatch)
        first = max((end + 1 for end in ends if end < microbatch), default=0)
        total = torch.stack([step.shares[one] for one in range(first, last + 1)]).sum()
        share = step.shares[microbatch]
        return torch.where(total > 0, share / total, torch.zeros_like(share))

    def _note(self, start: int, version: int) -> None:
        """Record an action that has just ended."""
        draft = self.draft
        draft.starts.append(start)
        draft.ends.append(self.clock.mark())
        ended = self.clock.now()
        draft.versions.append(version)
        draft.held.append(self.in_flight)
        if self.scale is not None:
            size, peak = self.scale.weigh_action()
            draft.stash.append(size)
            draft.peaks.append(peak)
        draft.spent(NOTE, ended, self.clock.now())

    def _key(self, position: int, microbatch: int) -> int:
        """Return the number of a microbatch in its stage: other than those that the stage itself counts."""
        return (position + 1) * self.stream.num_microbatches + microbatch

    def _unkeyed(self, key: int) -> Place:
        position, microbatch = divmod(key, self.stream.num_microbatches)
        return position - 1, microbatch

    # ---- gradients and updates ---------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.stages.values():
            yield from stage.parameters

    def _enter(self, draft: Draft) -> None:
        """Take up the gradients that have begun to add up."""
        self.draft = draft
        self.exchange.begin()
        for one in self._parameters():
            one.grad = self._partial.pop(one, None)

    def _leave(self) -> None:
        """Keep the gradients that have begun to add up, and steps that later slices still need."""
        self.exchange.refuse_changes()
        for one in self._parameters():
            if one.grad is not None:
                self._partial[one] = one.grad
                one.grad = None
        for position in [one for one in self._steps if one < self.position - self.stream.num_back]:
            del self._steps[position]
        self.current = None

    def _close(self, position: int, microbatch: int) -> None:
        """Put aside the gradients of an update, which are complete on this rank."""
        step, settings = self._steps[position]
        if self.exchange.has_ties:
            self.channel.belongs(step.number)
            self.exchange.offer_tied(microbatch)
        made = {one: one.grad for one in self._parameters() if one.grad is not None}
        group = self.pending[position, microbatch] = Group(made, settings, is_summed=not self.exchange.has_ties)
        if group.is_summed:
            self._tell_norms(group, position, microbatch)
        for one in made:
            one.grad = None

    def _sum(self, group: Group, position: int, microbatch: int) -> Generator[Wait, None, None]:
        """Add the gradients of other ranks to those of tied parameters."""
        aside = {one: one.grad for one in self._parameters()}
        for one in aside:
            one.grad = group.gradients.get(one)
        self.channel.belongs(self._steps[position][0].number)
        yield from self.exchange.sum_tied(self.clock, self.draft, self.clock.now(), microbatch)
        group.gradients = {one: one.grad for one in aside if one.grad is not None}
        group.is_summed = True
        self._tell_norms(group, position, microbatch)
        for one, gradient in aside.items():
            one.grad = gradient

    def _tell_norms(self, group: Group, position: int, microbatch: int) -> None:
        """Tell all ranks the norms of an update's gradients, which the parameters have now, if they are clipped."""
        if self.optimizers.max_norm is not None:
            self.channel.tell(self._topic(position, microbatch), self.optimizers.norms(self.rank))
            group.is_told = True

    def _topic(self, position: int, microbatch: int) -> str:
        return f"norms/{self.num_begun}/{position}/{microbatch}"

    def _clip(
        self, changing: list[nn.Parameter], action: Action, position: int, microbatch: int
    ) -> Generator[Wait, None, None]:
        """Scale the gradients of an update by the norm of all ranks' gradients."""
        told = self.channel.hear_now(self._topic(position, microbatch))
        while told is None:
            yield Wait(self.rank, action, action, (self.rank + 1) % self.channel.num_ranks)
            told = self.channel.hear_now(self._topic(position, microbatch))
        self.optimizers.clip(told, changing)

    def _update(self, cell: Cell, position: int) -> Generator[Wait, None, None]:
        """Make an update of the stage."""
        group = self.pending.pop((position, cell.microbatch))
        if not group.is_summed:
            yield from self._sum(group, position, cell.microbatch)
        gradients = list(group.gradients.values())
        if self.check_finite and not bool(all_finite(gradients)):
            raise NonFiniteError(
                f"a gradient of stage {cell.stage} is NaN or infinite",
                expected="finite numbers; the stage was not updated",
                fix="load the last checkpoint and lower the learning rate, or pass check_finite=False",
            )
        aside = {one: one.grad for one in self._parameters()}
        for one in aside:
            one.grad = group.gradients.get(one)
        changing = [one for one in aside if one.grad is not None]
        if self.optimizers.max_norm is not None:
            if not group.is_told:  # it comes from a checkpoint
                self._tell_norms(group, position, cell.microbatch)
            yield from self._clip(changing, self.stream.action(cell), position, cell.microbatch)
        start = self.clock.start(directly=False)
        self.optimizers.update(changing, group.settings, self.versions[cell.stage].update)
        for one, gradient in aside.items():
            one.grad = gradient
        self._note(start, self.versions[cell.stage].number)
