"""One step on this process: its parts, in the order in which they run.

    take     store the batch at the first stage and the target at the last, and split them into microbatches
    begin    observers prepare: put earlier gradients aside, scale the loss
    run      this process's ranks run their rows
    end      observers restore what they set aside
    tell     all ranks tell each other the outcome, and none waits for another

Whatever else there is observes the step: see engine/ranks/observer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drumline.channel.channel import step_topic
from drumline.channel.launch.stop import asked
from drumline.core.errors import ModelError, RunError
from drumline.engine.model.model_watch import WatchedModel
from drumline.engine.program.programs import digest_of
from drumline.engine.ranks.agreement import ArgumentPrint, TracedKinds, begun
from drumline.engine.ranks.observer import Observers
from drumline.engine.ranks.tally import RankReport, Tally
from drumline.engine.site import Site
from drumline.engine.stages.balance import Balance
from drumline.runtime.batch import counted_in
from drumline.runtime.step import CalledWith, Step

_NOBODY = Observers(())  # who observes an evaluation while it runs


@dataclass(eq=False, kw_only=True)
class StepRun(Site):
    """The parts of a pipeline on this process, and what is attached to it; runs its steps."""

    watched: WatchedModel = field(init=False)
    followed: TracedKinds
    balance: Balance | None

    def prepared(self, step: Step, user_call: CalledWith, program: Any) -> CalledWith:
        """Prepare a training step, by a program if it names one; return what this process takes of its arguments."""
        call, observers = user_call, self.observers
        for part_of in observers.take_call:
            call = part_of(step, call)
        self._refuse(step)
        for before in observers.before:
            before(step)
        if program is None and step.instead is not None:
            self.choice.run_instead(step)
        else:
            self.run_by(step, program)
        self.catch_up(step)
        for ahead in observers.ahead:
            ahead(step, call, user_call)
        return call

    def evaluate(self, step: Step, call: CalledWith) -> Tally:
        """Run the forwards alone; return a tally of what all ranks will tell about it."""
        for part_of in self.observers.take_call:
            call = part_of(step, call)
        self.catch_up(step)
        self.recording.evaluating(step)
        return self.run(step, call)

    def run_by(self, step: Step, program: Any) -> None:
        """Have a step run by the program that it names, or by the pipeline's own; all ranks call it alike."""
        step.program = self.programs.own_number
        if program is not None or self.engine.number != step.program:
            self.choice.run_by(step, program)

    def _refuse(self, step: Step) -> None:
        """Refuse a step that cannot train, before contacting any other rank."""
        if not self.intake.has_loss:
            raise ModelError("the pipeline has no loss_fn", fix="pass loss_fn= to Pipeline, or use eval_step")
        if torch.is_inference_mode_enabled():
            raise RunError("step was called inside torch.inference_mode()", fix="call it outside, or use eval_step")
        for refuse in self.observers.refuse_step:
            refuse(step)
        self.frozen.check_trains()

    def catch_up(self, step: Step) -> None:
        """Check the steps before the last one, and adopt changes of the model and its parameters since then."""
        # Raises the same error on all ranks, which may continue afterwards.
        ahead = 2 + self.flow.num_ahead
        self.ledger.settle(until=step.number - ahead, gradients_left=self.holdings.has_gradients)
        with self.crew.together("the start of a step"):
            if self.watched.look():
                for renewed in self.observers.renewed:
                    renewed()
            self.holdings.follow()
        if step.train and self.ledger.has_followed(step.number - ahead):
            for followed in self.observers.followed:
                followed()
        if self.engine.renew():
            self.holdings.renew()
            self.updates.follow(self.engine.parameters())
            self.ledger.unused.begin()

    def run(self, step: Step, call: CalledWith) -> Tally:
        """Run a step on this process's ranks, and return a tally of what all ranks will tell about it."""
        observers = self.observers if step.train else _NOBODY
        for called_function in observers.at_call:
            called_function(step)
        with self.crew.together("the start of a step", lambda: self.engine.action):
            if step.train:
                self.frozen.check_still(self.engine.stages())
            batch = self.intake.first_value(call.batch, call.named)
            self.intake.take(step, batch, call.target, self.engine.ends, self.crew)
            # Other ranks compare their batches with this; ranks in one process share one batch.
            function = None if self.crew.alone else begun((call.batch, call.named), call.target)
            if function is not None:
                for compared in self.observers.compared:
                    compared(step, function)
            for taken in observers.taken:
                taken(step)
            self.cut(step)
            for begin in observers.begin:
                begin(step)
            self.run_rows(step)
            for end in observers.end:
                end(step)
            return self._tell(step, function and function())

    def _tell(self, step: Step, fingerprint: ArgumentPrint | None) -> Tally:
        """Tell all ranks the outcome of the step here; return a tally of what all ranks tell."""
        report = self._report(step)
        report.arguments, report.followed = fingerprint, self.followed.fresh()
        program = self.frozen.program
        if step.program:
            program = self.programs[step.program]
            report.program = (digest_of(program), program.name)
        report.order = step.order
        each = [report] + [RankReport(train=step.train, program=report.program) for _ in self.crew.channels[1:]]
        for tell in self.observers.tell:
            tell(step, each)
        topic = step_topic(step.number)
        self.crew.tell(topic, each)
        if not step.train:
            program = self.engine.forwards
        tally = Tally(step.number, lambda: self.crew.heard(topic), program, self.updates.handler, self.crew.naming)
        tally.program_number, tally.trained = step.program, step.draw
        self.ledger.add(tally, trained=step.train, alone=self.crew.alone)
        for heard in self.observers.after_telling:
            heard(step, tally, each)
        return tally

    def _report(self, step: Step) -> RankReport:
        """Return the outcome of a step on this process: its parts of the loss, and any problem."""
        report = RankReport(sorted(step.losses), train=step.train, share=step.share, stop=asked())
        report.num_rows, report.num_tokens = counted_in(step.batch)
        losses = []
        if report.microbatches:
            parts = self._losses(step, report.microbatches)
            losses.append(parts)
            report.dtype = str(parts.dtype).removeprefix("torch.")
            report.losses = parts.unbind() if self.crew.alone else parts.tolist()
        if step.train:
            self.flow.judge(step, report, losses)
        return report

    def _losses(self, step: Step, microbatches: Sequence[int]) -> Tensor:
        """Return the microbatches' parts of the loss, over all lines of a mesh; these call it alike."""
        losses = torch.stack([step.losses[microbatch] for microbatch in microbatches])
        shares = torch.stack([step.shares[microbatch] for microbatch in microbatches]).to(losses.dtype)
        parts = torch.where(shares == 0, 0.0, losses * shares)  # the mean over nothing is NaN
        kinds = [step.losses[number].dtype for number in microbatches if self.intake.is_counted(step, number)]
        return self.lines.losses(parts, kinds)
