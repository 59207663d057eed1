"""Run a rank's row of a schedule without a flush: one slice per step, with updates inside.

    step t       slice t of the row: F of step t; B and UPDATE of step t and of those before
    pause        B of all microbatches in flight, on all ranks: nothing is in flight, and no update was made early
    drain        the same, then all updates that are due

After a pause the next slices skip the backwards that have run, and make their updates where they always are. So a pause
changes no number: evaluations and checkpoints do not disturb training. After a drain the stream begins again.

Gradients add up in `.grad` while a slice runs. With the last microbatch of an update they move to `pending`, and with
the UPDATE to the optimizer, unless they are not finite; what has begun to add up for the next update waits aside
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drumline.channel.channel import Wait
from drumline.core.action import Action, Op
from drumline.core.rules import Backward
from drumline.features.stream.rows import BACKWARDS, Cell, StreamRows, runs
from drumline.features.stream.verdicts import Judged, Norms, Place, Verdicts
from drumline.features.stream.versions import Versions
from drumline.runtime.draft import BEGIN, NOTE, Draft
from drumline.runtime.execute.executor import Executor, Gradients
from drumline.runtime.execute.jobs import Job
from drumline.runtime.gradients.clip import all_finite
from drumline.runtime.step import Step

_BETWEEN_STEPS = -2  # a pause belongs to no step


class Stepping(Norms, Protocol):
    """The optimizers, as an executor sees them."""

    def clip(self, norm: Tensor, parameters: list[nn.Parameter]) -> None:
        """Scale the gradients of these parameters, given the norm of all ranks' gradients."""

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
    is_finite: bool = True  # whether they and the losses are, on this rank
    is_told: bool = False  # whether other ranks know that, and the gradients' norms
    judged: Judged | None = None  # what all ranks said


_NO_CELL, _NO_ACTION = Cell(Op.FORWARD, 0, 0, 0), Action(0, Op.FORWARD, 0)


@dataclass(slots=True)
class _SliceJob(Job):
    """A cell of a slice; `shown` is its action in the step's program, `target` the rank that gets what it makes."""

    cell: Cell = _NO_CELL
    shown: Action = _NO_ACTION
    sends: Action | None = None  # the message under which its result leaves
    target: int = -1


class StreamExecutor(Executor):
    """One rank's stage and its endless row; give it `stream` and `optimizers` before it runs."""

    stream: StreamRows
    optimizers: Stepping
    check_finite = True

    def attach(self, stream: StreamRows, optimizers: Stepping, *, check_finite: bool, together: bool) -> None:
        """Run these rows, and step these optimizers; `together` if all ranks make an update at the same place."""
        self.stream, self.optimizers, self.check_finite = stream, optimizers, check_finite
        self.verdicts = Verdicts(
            self.channel, self.rank, stream.ends, optimizers, check_finite=check_finite, together=together
        )
        rows = [cell.op for each in stream.slices for cell in each[self.rank]]
        self._updates = Op.UPDATE in rows  # else its stage is frozen
        self._closes = BACKWARDS if any(op in rows for op in BACKWARDS) else (Op.FORWARD,)
        self.versions = {index: Versions(stage) for index, stage in self.stages.items()}
        self._cached: dict[tuple[int, int], list[_SliceJob]] = {}
        self.restart()

    def restart(self) -> None:
        """Begin the stream again, with nothing in flight and no update due."""
        self.go_on(0)
        self.pending: dict[Place, Group] = {}
        self._steps: dict[int, tuple[Step, Any]] = {}  # by position, with the optimizers' settings
        self._partial: dict[nn.Parameter, Tensor] = {}
        for index, versions in self.versions.items():
            versions.clear()
            self.stages[index].held.clear()
        self._made.clear()
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
        return sum(len(stage.held) for stage in self.stages.values())

    def run(self, step: Step, draft: Draft, jobs: Any = None) -> Generator[Wait, None, None]:
        """Run the slice of a step."""
        self._steps[self.position] = step, self.optimizers.settings()
        self.verdicts.number(self.position, step.draw)
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
        yield from self.verdicts.decide(self.position - self.stream.num_back, self._stage)
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
            if not group.is_summed:
                yield from self._sum(group, position, microbatch)
            yield from self._judge(group, position, microbatch)
        yield from self.verdicts.decide(self.position, self._stage)
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
        if job.cell.op in self._closes and job.microbatch in self.stream.ends:
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
        if len(self.stream.ends) == 1:
            return step.shares[microbatch]  # an update takes in the whole step
        total = torch.stack([step.shares[one] for one in self._with(microbatch)]).sum()
        share = step.shares[microbatch]
        return torch.where(total > 0, share / total, torch.zeros_like(share))

    def _with(self, microbatch: int) -> range:
        """Return the microbatches of the update that takes in this one."""
        ends = self.stream.ends
        return range(max((end + 1 for end in ends if end < microbatch), default=0),
                     min(end for end in ends if end >= microbatch) + 1)  # fmt: skip

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

    @property
    def _stage(self) -> int:
        return min(self.stages)

    @contextmanager
    def _having(self, gradients: Mapping[nn.Parameter, Tensor]) -> Iterator[list[nn.Parameter]]:
        """Let parameters have these gradients inside, and no others; yields all parameters."""
        aside = {one: one.grad for one in self._parameters()}
        for one in aside:
            one.grad = gradients.get(one)
        yield list(aside)
        for one, gradient in aside.items():
            one.grad = gradient

    def _close(self, position: int, microbatch: int) -> None:
        """Put aside the gradients of an update, which are complete on this rank."""
        step, settings = self._steps[position]
        if self.exchange.has_ties:
            self.channel.belongs(step.number)
            self.exchange.offer_tied(microbatch)
        made = {one: one.grad for one in self._parameters() if one.grad is not None}
        for one in made:
            one.grad = None
        group = Group(made, settings, is_summed=not self.exchange.has_ties or not self._updates)
        losses = [step.losses[one] for one in self._with(microbatch) if one in step.losses]
        group.is_finite = not self.check_finite or bool(all_finite([*made.values(), *losses]))
        if group.is_summed:
            self._tell(group, position, microbatch)
        if self._updates:
            self.pending[position, microbatch] = group

    def _sum(self, group: Group, position: int, microbatch: int) -> Generator[Wait, None, None]:
        """Add the gradients of other ranks to those of tied parameters."""
        with self._having(group.gradients) as parameters:
            self.channel.belongs(self._steps[position][0].number)
            yield from self.exchange.sum_tied(self.clock, self.draft, self.clock.now(), microbatch)
            group.gradients = {one: one.grad for one in parameters if one.grad is not None}
        group.is_summed = True
        if self.check_finite and group.is_finite:  # sums may be too large
            group.is_finite = bool(all_finite(list(group.gradients.values())))
        self._tell(group, position, microbatch)

    def _tell(self, group: Group, position: int, microbatch: int) -> None:
        """Tell all ranks about the gradients of an update on this one."""
        with self._having(group.gradients):
            self.verdicts.tell((position, microbatch), is_finite=group.is_finite)
        group.is_told = True

    def _judge(self, group: Group, position: int, microbatch: int) -> Generator[Wait, None, None]:
        """Hear what all ranks say about an update, if all make it at the same place."""
        if group.judged is None and self.verdicts.together and self.verdicts.is_on:
            if not group.is_told:  # it comes from a checkpoint
                self._tell(group, position, microbatch)
            group.judged = yield from self.verdicts.hear((position, microbatch), self._stage)

    def _update(self, cell: Cell, position: int) -> Generator[Wait, None, None]:
        """Make an update of the stage, or leave it out; it counts as a version either way."""
        group = self.pending.pop((position, cell.microbatch))
        if not group.is_summed:
            yield from self._sum(group, position, cell.microbatch)
        yield from self._judge(group, position, cell.microbatch)
        judged, versions = group.judged, self.versions[cell.stage]
        start = self.clock.start(directly=False)
        if judged.bad if judged is not None else not group.is_finite:
            versions.update([])
        else:
            with self._having(group.gradients) as parameters:
                changing = [one for one in parameters if one.grad is not None]
                if judged is not None and judged.norm is not None:
                    self.optimizers.clip(judged.norm, changing)
                self.optimizers.update(changing, group.settings, versions.update)
        self._note(start, versions.number)
