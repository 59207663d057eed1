"""One step on this process: its parts, in the order in which they run.

    take     store the batch at the first stage and the target at the last, and split them into microbatches
    begin    observers prepare: put earlier gradients aside, scale the loss
    run      this process's ranks run their rows
    end      observers restore what they put aside
             or, if the update before it was wrong: observers mend that, and it runs again
    tell     all ranks tell each other the outcome, and none waits for another

Recording, adaptation, capture and saved state observe the step: see ranks/observer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.channel.channel import step_topic
from drumline.channel.launch.stop import asked
from drumline.channel.lines.grid import DATA
from drumline.core.errors import ModelError, RunError
from drumline.engine.program.programs import digest_of
from drumline.engine.ranks.agreement import Followed, Given, begun
from drumline.engine.ranks.observer import Observers
from drumline.engine.ranks.same_rows import agree_on_rows
from drumline.engine.ranks.tally import Tally, Told
from drumline.engine.site import Site
from drumline.engine.stages.balance import Balance
from drumline.features.check.model_check import ModelCheck
from drumline.features.check.watched import Watched
from drumline.features.mesh import sequences
from drumline.features.mesh.losses import summed_losses
from drumline.features.record.recording import Recording
from drumline.features.stream.stream import Stream
from drumline.model.values import pack
from drumline.pipeline.steps.program_choice import ProgramChoice
from drumline.pipeline.steps.result import CalledWith
from drumline.runtime.batch import counted_in
from drumline.runtime.gradients.clip import all_finite
from drumline.runtime.step import Step

_STEP, _EVALUATED, _KINDS = 100, 200, 1000  # the kinds of step on which lines agree
_NOBODY = Observers(())  # who observes an evaluation while it runs


@dataclass(eq=False)
class StepRun(Site):
    """The parts of a pipeline on this process, and what is attached to it; runs its steps."""

    recording: Recording
    watched: Watched
    followed: Followed
    check: ModelCheck
    choice: ProgramChoice
    balance: Balance | None
    check_finite: bool
    positions: sequences.Takes | None  # how the model takes positions, if lines of a mesh divide sequences
    stream: Stream | None  # of a schedule without a flush
    _whole: Callable[[], Given] | None = None  # fingerprint of the step's whole sequences, if lines divide them

    def pause(self, what: str) -> None:
        """Before something else than a step, run what is in flight; all ranks call it alike."""
        if self.stream is not None:
            with self.crew.together(what, lambda: self.engine.action):
                self.stream.pause()

    def part_of(self, call: CalledWith) -> CalledWith:
        """Return this line's part of a step's arguments, if the lines of a mesh divide sequences."""
        if self.positions is None:
            return call
        self._whole = begun((call.batch, call.named), call.target)
        return CalledWith(*sequences.divided(*call, self.positions, self.crew.axes))

    def refuse(self, step: Step) -> None:
        """Refuse a step that cannot train, before contacting any other rank."""
        if not self.intake.has_loss:
            raise ModelError("the pipeline has no loss_fn", fix="pass loss_fn= to Pipeline, or use eval_step")
        if torch.is_inference_mode_enabled():
            raise RunError("step was called inside torch.inference_mode()", fix="call it outside, or use eval_step")
        if self.check.refusal is not None:
            self.check.refuse()
        self.frozen.check_trains()

    def catch_up(self, step: Step) -> None:
        """Check the steps before the last one, and adopt changes of the model and its parameters since then."""
        # Raises the same error on all ranks, which may continue afterwards.
        ahead = 2 if self.stream is None else 2 + self.stream.num_ahead
        self.ledger.settle(until=step.number - ahead, gradients_left=self.holdings.has_gradients)
        if not step.train and self.updates.validation.is_on:
            self.recording.settle()  # evaluations see parameters that all ranks agree on
        with self.crew.together("the start of a step"):
            if self.watched.look():
                self.check.renewed()
            self.holdings.follow()
        if step.train and self.ledger.has_followed(step.number - ahead):
            self.check.followed()
        if self.engine.renew():
            self.holdings.renew()
            self.updates.follow(self.engine.parameters())
            self.ledger.unused.begin()

    def check_before(self, step: Step, call: CalledWith, given: CalledWith) -> None:
        """If a step is checked, run microbatches of it through the unsplit model, to compare the step with it.

        `given` is what the user called the step with, `call` this line's part of it.
        """
        if not step.number:
            with self.crew.together("the check of the model"):
                self.check.agree_on_weights()
        if not self.check.takes(step):
            return
        if self.updates.validation.is_on:
            self.recording.settle()  # else an update may be taken back in the middle of the step
        with self.recording.between.during("check"), self.crew.together("the check of the model"):
            self.check.agree_on_weights()
            scale = 1.0 if self.updates.scaler is None else self.updates.scaler.scale
            called = self.intake.called(call.batch, call.named)
            whole = None
            if self.positions is not None:
                args, named, target = sequences.placed(*given, self.positions, self.crew.axes)
                whole = self.intake.called(args, named), target
            self.check.before(step, called, call.target, scale * step.share, whole)

    def check_after(self, step: Step) -> None:
        """Compare a checked step with that run."""
        before = self.check.checked
        try:
            self.check.after(step)
        finally:
            if (checked := self.check.checked) is not None and checked is not before:
                self.recording.note(
                    **{
                        "check_metrics/seconds": checked.seconds,
                        "check_metrics/parameters": checked.num_parameters,
                        "check_metrics/wrong": len(checked.wrong),
                    }
                )

    def run(self, step: Step, call: CalledWith) -> Tally:
        """Run a step on this process's ranks, and return a tally of what all ranks will tell about it."""
        with nullcontext() if self.stream is None or not step.train else self.stream.running(step):
            observers = self.observers if step.train else _NOBODY
            for called in observers.called:
                called(step)
            with self.crew.together("the start of a step", lambda: self.engine.action):
                if step.train:
                    self.frozen.check_still(self.engine.stages())
                batch = self.intake.called(call.batch, call.named)
                self.intake.take(step, batch, call.target, self.engine.ends, self.crew)
                # Other ranks compare their batches with this; ranks in one process share one batch.
                given = None if self.crew.alone else begun((call.batch, call.named), call.target)
                if given is not None:
                    self._agree_on_lines(step, given)
                for taken in observers.taken:
                    taken(step)
                if not step.repeats or self.intake.counts_labels:  # else its weights are those of the last step
                    self.intake.cut(step)
                for begin in observers.begin:
                    begin(step)
                self.engine.run(step)
                if step.rejected:
                    for again in observers.again:
                        again(step)
                    self.engine.run(step)
                for end in observers.end:
                    end(step)
                return self._tell(step, given and given())

    def _agree_on_lines(self, step: Step, given: Callable[[], Given]) -> None:
        """Raise where lines of a mesh were called with what does not go together, before they exchange anything."""
        axes, device = self.crew.axes, self.intake.device
        if axes.size("tp") > 1:
            agree_on_rows(axes, "tp", given(), step.number, device)
        if self._whole is not None:
            agree_on_rows(axes, "cp", self._whole(), step.number, device)
        own = self.programs.own == step.program
        if axes.size(*DATA) > 1 and "last" in self.engine.ends and not (step.train and own):
            kind = _STEP if step.train else _EVALUATED + min(len(pack(step.target)[0]), _STEP)
            number = 0 if own else int(digest_of(self.programs[step.program])[:4], 16)
            axes.agree_on_call(kind + _KINDS * number, device)

    def _tell(self, step: Step, given: Given | None) -> Tally:
        """Tell all ranks the outcome of the step here; return a tally of what all ranks tell."""
        told = self._told(step)
        told.given, told.followed = given, self.followed.fresh()
        program = self.frozen.program
        if step.program:
            program = self.programs[step.program]
            told.program = (digest_of(program), program.name)
        told.order = step.order
        each = [told] + [Told(train=step.train, program=told.program) for _ in self.crew.channels[1:]]
        for tell in self.observers.tell:
            tell(step, each)
        topic = step_topic(step.number)
        self.crew.tell(topic, each)
        if not step.train:
            program = self.engine.forwards
        tally = Tally(step.number, lambda: self.crew.heard(topic), program, self.updates.handler, self.crew.called)
        tally.program_number, tally.trained = step.program, step.draw
        self.ledger.add(tally, trained=step.train, alone=self.crew.alone)
        for heard in self.observers.told:
            heard(step, tally, each)
        return tally

    def _told(self, step: Step) -> Told:
        """Return the outcome of a step on this process: its parts of the loss, and any problem."""
        alone, scaler = self.crew.alone, self.updates.scaler
        told = Told(sorted(step.losses), train=step.train, share=step.share, stop=asked())
        told.num_rows, told.num_tokens = counted_in(step.batch)
        checked = [one.grad for one in self.holdings.parameters() if one.grad is not None]
        if told.microbatches:
            parts = self._losses(step, told.microbatches)
            checked.append(parts)
            told.dtype = str(parts.dtype).removeprefix("torch.")
            told.losses = parts.unbind() if alone else parts.tolist()
        if self.stream is not None:
            return told  # every update checks its own gradients
        if step.train and (self.check_finite or scaler is not None):
            told.scale = None if scaler is None else step.scale
            finite = all_finite(checked)
            told.finite = finite if alone else self._on_all_lines(bool(finite))
        if step.train and self.ledger.unused.looks:
            named = self.holdings.named_parameters()
            told.unreached = [name for name, one in named if one.requires_grad and one.grad is None]
        return told

    def _losses(self, step: Step, microbatches: Sequence[int]) -> Tensor:
        """Return the microbatches' parts of the loss, over all lines of a mesh; these call it alike."""
        losses = torch.stack([step.losses[one] for one in microbatches])
        shares = torch.stack([step.shares[one] for one in microbatches]).to(losses.dtype)
        parts = torch.where(shares == 0, 0.0, losses * shares)  # the mean over nothing is NaN
        kinds = [step.losses[one].dtype for one in microbatches if self.intake.is_counted(step, one)]
        return summed_losses(self.crew.axes, parts, kinds)

    def _on_all_lines(self, finite: bool) -> bool:
        """Whether it holds on all lines that may hold other parts of the same parameters; these call it alike."""
        axes, names = self.crew.axes, ["ep", "tp"] if self.holdings.shards is None else ["dp", "ep", "tp"]
        if axes.size(*names) == 1:
            return finite
        wrong = torch.tensor([0.0 if finite else 1.0], device=self.intake.device)
        return not axes.summed(wrong, *names).item()
