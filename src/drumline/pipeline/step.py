"""One step on this process: all that takes part in it, in the order in which each has its turn.

    take     the batch where the first stage is, the target where the last one is, cut into microbatches
    begin    observers prepare: earlier gradients are put aside, the loss is scaled
    run      this process's ranks run their rows
    end      observers put back what they put aside
    tell     all ranks hear what came of it, and none waits for another

Recording, adaptation, capture and what is put aside meanwhile watch the step: see observer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drumline.core.errors import ModelError, RunError, UsageError
from drumline.core.program import Program
from drumline.pipeline.auto_schedule import AutoSchedule
from drumline.pipeline.balance import Balance
from drumline.pipeline.crew import Crew
from drumline.pipeline.engine import Engine
from drumline.pipeline.intake import Intake
from drumline.pipeline.lengths.arrange import Arranging
from drumline.pipeline.lengths.programs import Programs, digest_of
from drumline.pipeline.observer import Observer
from drumline.pipeline.record.recording import Recording
from drumline.pipeline.record.tally import Ledger, Tally, Told
from drumline.pipeline.state.frozen import Frozen
from drumline.pipeline.state.tensors import Holdings
from drumline.pipeline.state.updates import Updates
from drumline.pipeline.verify.agreement import Followed, Given, begun
from drumline.pipeline.verify.model_check import ModelCheck
from drumline.pipeline.verify.watched import Watched
from drumline.runtime.batch import counted_in
from drumline.runtime.channel.channel import step_topic
from drumline.runtime.executor import Step
from drumline.runtime.gradients.clip import all_finite
from drumline.runtime.microbatches import Microbatches
from drumline.runtime.values import joined, pack


class CalledWith(NamedTuple):
    """What a step was called with."""

    batch: tuple[Any, ...]
    named: dict[str, Any]
    target: Any


@dataclass
class StepResult:
    """The outcome of one step. `loss` is the whole batch's, on every rank; reading it may wait for the last stage.

    `output` is the model's output for the whole batch, after `eval_step` on ranks that hold the last stage; else None.
    """

    step: int
    _loss: Callable[[], Tensor | None] = field(repr=False)
    output: Any = field(default=None, repr=False)

    @cached_property
    def loss(self) -> Tensor | None:
        """The mean loss over the batch, detached; None where no target was given."""
        return self._loss()


@dataclass(eq=False)
class StepRun:
    """What a pipeline consists of on this process; runs its steps."""

    crew: Crew
    ledger: Ledger
    intake: Intake
    frozen: Frozen
    engine: Engine
    holdings: Holdings
    updates: Updates
    recording: Recording
    watched: Watched
    followed: Followed
    check: ModelCheck
    observers: Sequence[Observer]
    auto: AutoSchedule | None
    balance: Balance | None
    check_finite: bool
    programs: Programs
    arranging: Arranging

    def run_by(self, step: Step, program: str | Program | None) -> None:
        """Have a step run by the program that it names, or by the pipeline's own; all ranks call it alike."""
        if program is None and self.engine.number == 0:
            return
        with self.crew.together("the choice of a program"):
            number = self.programs.number_of(program)
            if number and (why := self.engine.runs_one_program or ("schedule='auto'" if self.auto is not None else "")):
                raise UsageError(
                    f"a step names a program, and the pipeline was made with {why}",
                    expected="one program in all steps there",
                )
            step.program = number
            if number != self.engine.number:
                program = self.programs[number] if number else self.frozen.program
                self.engine.run_by(number, program)
                self.intake.num_microbatches = program.num_microbatches

    def refuse(self, step: Step) -> None:
        """Refuse a step that cannot train, before any other rank is asked."""
        if not self.intake.has_loss:
            raise ModelError("the pipeline has no loss_fn", fix="pass one, or use eval_step for inference")
        if torch.is_inference_mode_enabled():
            raise RunError("step inside torch.inference_mode()", fix="leave it: nothing can be trained there")
        self.check.refuse()
        self.frozen.check_trains()

    def catch_up(self, step: Step) -> None:
        """Hear of the steps before the last one, and follow what happened to the model and its parameters since."""
        # Raises alike on all ranks, which may go on afterwards.
        self.ledger.settle(until=step.number - 2, gradients_left=self.holdings.has_gradients)
        with self.crew.together("the start of a step"):
            self.watched.look()
        self.holdings.follow()
        if self.engine.renew():
            self.holdings.renew()
            self.updates.follow(self.engine.parameters())
            self.ledger.unused.begin()

    def check_before(self, step: Step, call: CalledWith) -> None:
        """Run a microbatch of the first step through the model by itself, for the step to be held against."""
        if not self.check.is_pending and step.number:
            return
        # A chain has no check.
        recorded = self.recording.between.during("check") if self.check.is_pending else nullcontext()
        with recorded, self.crew.together("the check of the model"):
            self.check.agree_on_weights()
            scale = 1.0 if self.updates.scaler is None else self.updates.scaler.scale
            self.check.before(step.number, self.intake.called(call.batch, call.named), call.target, scale)

    def check_after(self, step: Step) -> None:
        """Hold the first step against that."""
        if not self.check.is_pending:
            return
        try:
            self.check.after(step)
        finally:
            if (checked := self.check.checked) is not None:
                self.recording.note(
                    **{
                        "check_metrics/seconds": checked.seconds,
                        "check_metrics/parameters": checked.num_parameters,
                        "check_metrics/wrong": len(checked.wrong),
                    }
                )

    def run(self, step: Step, call: CalledWith) -> Tally:
        """Run a step on this process's ranks, and return what will be heard of it on all of them."""
        observers = self.observers if step.train else ()
        for observer in observers:
            observer.called(step)
        with self.crew.together("the start of a step", lambda: self.engine.action):
            if step.train:
                self.frozen.check_still(self.engine.stages())
            batch = self.intake.called(call.batch, call.named)
            self.intake.take(step, batch, call.target, self.engine.ends, self.crew.rank)
            # What other ranks compare their batches with; ranks of one process have one.
            given = None if self.crew.alone else begun((call.batch, call.named), call.target)
            for observer in observers:
                observer.taken(step)
            if not step.repeats or self.intake.counts_labels:  # else it weighs what the last one did
                self.intake.cut(step)
            for observer in observers:
                observer.begin(step)
            self.engine.run(step)
            for observer in reversed(observers):
                observer.end(step)
            return self._tell(step, given and given())

    def _tell(self, step: Step, given: Given | None) -> Tally:
        """Tell all ranks how the step went here; returns what will be heard of all of them."""
        told = self._told(step)
        told.given, told.followed = given, self.followed.fresh()
        program = self.frozen.program
        if step.program:
            program = self.programs[step.program]
            told.program = (digest_of(program), program.name)
        told.order = step.order
        each = [told] + [Told(train=step.train, program=told.program) for _ in self.crew.channels[1:]]
        for observer in self.observers:
            observer.tell(step, each)
        topic = step_topic(step.number)
        self.crew.tell(topic, each)
        tally = Tally(step.number, lambda: self.crew.heard(topic), program, self.updates.scaler)
        tally.program_number = step.program
        self.ledger.add(tally, trained=step.train, alone=self.crew.alone)
        for observer in self.observers:
            observer.told(step, tally, each)
        return tally

    def _told(self, step: Step) -> Told:
        """Return what came of a step on this process: its parts of the loss, and what may be wrong with it."""
        alone, scaler = self.crew.alone, self.updates.scaler
        told = Told(sorted(step.losses), train=step.train)
        told.num_rows, told.num_tokens = counted_in(step.batch)
        checked = [one.grad for one in self.holdings.parameters() if one.grad is not None]
        if told.microbatches:
            losses = torch.stack([step.losses[one] for one in told.microbatches])
            parts = losses * torch.stack([step.shares[one] for one in told.microbatches]).to(losses.dtype)
            checked.append(parts)
            told.dtype = str(losses.dtype).removeprefix("torch.")
            told.losses = parts.unbind() if alone else parts.tolist()
        if step.train and (self.check_finite or scaler is not None):
            told.scale = None if scaler is None else step.scale
            finite = all_finite(checked)
            told.finite = finite if alone else bool(finite)
        if step.train and self.ledger.unused.looks:
            named = self.holdings.named_parameters()
            told.unreached = [name for name, one in named if one.requires_grad and one.grad is None]
        return told


def output_of(step: Step) -> Any:
    """Return what the last stage made of the whole batch; None where it was not here, or nobody wanted it.

    Where the user cut the microbatches, it is returned microbatch by microbatch.
    """
    order = sorted(step.outputs)
    if not order:
        return None
    if step.order:  # as they were given
        order = sorted(order, key=step.order.__getitem__)
    made = [step.outputs[one] for one in order]
    if step.apart or len({tuple(one.shape[1:] for one in pack(value)[0]) for value in made}) > 1:
        return Microbatches(made)
    return joined(made, [step.shares[one] for one in order] if len(step.shares) else [])
