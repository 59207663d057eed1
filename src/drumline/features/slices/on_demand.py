"""Slices that a pipeline may take up between two steps, where `schedule="auto"` leaves it open whether it has any.

    slicings     whether steps like the last one run in slices: nothing clashes, lengths divide, and the model computes
                 the same, stage by stage and in its loss. Nothing is changed by asking.
    took         a program in slices was taken up, or given up: the next step is divided like it
    take_call    a step whose sequences do not divide runs by the program in one piece; all ranks do so alike

While the program has whole sequences, nothing of this runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from drumline.core.errors import BatchError, DrumlineError
from drumline.core.program import Program
from drumline.core.settings.clash import Together
from drumline.core.slices.division import SliceLengths
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import RankReport
from drumline.engine.site import Site
from drumline.engine.stages.intake import Intake
from drumline.features.slices.calls import SliceCalls
from drumline.features.slices.following import follow
from drumline.features.slices.options import refuse_states
from drumline.features.slices.trial import StageTrials, near
from drumline.features.slices.units import BY_SLICES, in_one_piece, in_sequences, in_units
from drumline.model.patches import put_in
from drumline.runtime.sequences import Divider, Takes, positions_of, refuse_packed, sequences_in, without_packing
from drumline.runtime.stage import Stage
from drumline.runtime.step import CalledWith, Step
from drumline.runtime.user_batch import has_microbatches

_TRIED = Divider('schedule="auto" has tried to divide', "a schedule by name")
NO_CALL = CalledWith((), {}, None)


class SlicedIntake(Intake):
    """Splits steps into units; what is no step, such as an example that is timed, into microbatches."""

    def cut(self, step: Step) -> None:
        """Split a step; what the model's own loss counts may be seen by tracing it."""
        if self.num_slices == 1:
            super().cut(step)
            return
        with without_packing():
            super().cut(step)

    def cut_batch(self, batch: Any, *, what: str = "the batch") -> list[Any]:
        """Return the microbatches of a batch of whole sequences, or its units."""
        if self.num_slices == 1 or has_microbatches(batch):
            return super().cut_batch(batch, what=what)
        with put_in([(vars(self), "num_microbatches", self.num_microbatches // self.num_slices)]):
            return super().cut_batch(batch, what=what)


class SlicesOnDemand(Observer):
    """Divides the sequences of steps while a program in slices runs."""

    order = -1  # what else takes a call, takes units

    def __init__(self, site: Site, model: Any, program: Program) -> None:
        self._site, self._crew = site, site.crew
        self._whole = program  # the latest one in one piece
        self._num_slices = 1  # of the program that is taken up
        self._calls = SliceCalls(SliceLengths(1), around=without_packing)
        self._followed: list[Stage] = []
        self._call, self._tries, self._has_said = NO_CALL, False, False
        self._takes: Takes | None = None
        self._why_not = ""  # why the model never runs in slices
        try:
            self._takes = positions_of(model, BY_SLICES)
            refuse_states(model)
        except DrumlineError as error:
            self._why_not = error.error
        site.slicings = self.slicings
        site.lines.placed = partial(self._placed, site.lines.placed)  # type: ignore[method-assign]

    def take_call(self, step: Step, call: CalledWith) -> CalledWith:
        """Return a step's arguments in units, while there are slices."""
        if self._tries:
            return call
        if self._followed and self._known.counted:  # they were traced without masks
            value = call.named.get(self._known.name, next(iter(call.batch[self._known.place :]), None))
            with self._crew.together("dividing sequences"):
                refuse_packed(value, self._known.name, _TRIED)
        if self._num_slices == 1:
            self._call = NO_CALL if self._why_not else call
            return call
        self._call = NO_CALL
        units, why = self._divided(call, self._num_slices)
        with self._site.recording.between.during("hear"), self._crew.together("dividing sequences"):
            why = self._first_reason(why)
        self._divide(1 if why else self._num_slices)
        if not why:
            self._calls.begin(units)
            return units
        if self._crew.rank == self._crew.axes.number == 0 and not self._has_said:
            self._has_said = True
            print(f"slices: a step runs whole sequences, as do others like it: {why}", file=sys.stderr, flush=True)
        step.instead = self._whole
        if not step.train:
            self._site.choice.run_instead(step)
        return call

    def tell(self, step: Step, each: Sequence[RankReport]) -> None:
        """Return whole sequences of the last stage's output."""
        if step.outputs and self._calls.division.num_slices > 1:
            step.outputs, step.is_split = {0: in_sequences(step, self._num_slices)}, False

    def end(self, step: Step) -> None:
        """Forget the step's sequences."""
        self._calls.clear()

    def took(self, program: Program, number: int) -> None:
        """Divide sequences like the program that was taken up."""
        if program.num_slices == 1:
            self._whole = program
        else:
            self._follow()
        self._num_slices = program.num_slices
        self._divide(1)  # until a call is divided
        together = self._site.together
        self._site.together = Together(together.clashes, {**together.facts, "slices": program.num_slices})

    def _placed(self, placed: Callable[[CalledWith], CalledWith | None], call: CalledWith) -> CalledWith | None:
        """Return what the model by itself is called with, if a step has only parts of it."""
        return placed(call) if self._calls.division.num_slices == 1 else in_one_piece(call, self._known)

    # ---- whether there may be slices ---------------------------------------------------------------------------------

    def slicings(self, programs: Mapping[int, Program]) -> tuple[list[int], str]:
        """Return by which of these programs, by their numbers of slices, steps like this one run; else why none does.

        All ranks call it alike, after a step. They run its microbatches forward twice, and nothing is changed.
        """
        crew, call = self._crew, self._call
        batch = sequences_in(*call.batch, *call.named.values()) or sequences_in(call.target)
        mine, why = {}, self._refusal(call, min(programs))
        for number in programs if not why else ():
            _, reason = self._divided(call, number)
            mine[number] = reason
        length = batch[0].shape[1] if batch else 0
        answers = crew.everywhere("slices", (why, mine, length))
        why = next((why for why, _, _ in answers if why), "")
        numbers = [number for number in programs if not any(reasons.get(number) for _, reasons, _ in answers)]
        lengths = [length for _, _, length in answers if length]
        if why or not numbers:
            reasons = (reasons[min(programs)] for _, reasons, _ in answers if reasons)
            return [], why or next(filter(None, reasons), "")
        number = min(numbers)
        self._site.programs.divides.update(numbers)
        why = self._trial(call, programs[number], number, min(lengths))
        return ([], why) if why else (numbers, "")

    def _trial(self, call: CalledWith, program: Program, number: int, length: int) -> str:
        """Run a step's forwards whole and in slices; return how they differ, if they do. All ranks get one answer."""
        self._follow()
        trials, losses = StageTrials(self._calls, length, number), []
        try:
            self._tries = True
            for instead in (self._whole, program):
                self._divide(instead.num_slices)
                units, _ = self._divided(call, instead.num_slices)
                self._calls.begin(units)
                trials.note(partial(self._cut, units, instead))
                if why := self._first_reason(trials.reason):
                    return why
                with without_packing(), trials.on(self._followed):
                    losses.append(self._loss(units, instead))
                if why := self._first_reason(trials.reason):
                    return why
        finally:
            self._tries = False
            self._divide(1)
            self._calls.clear()
        whole, divided = losses
        differs = whole is not None and divided is not None and not near(divided, whole)
        why = f"the loss in {number} slices is {divided}, and {whole} of whole sequences" if differs else ""
        return self._first_reason(why)

    def _first_reason(self, why: str) -> str:
        """Return the first reason that any rank has."""
        return next(filter(None, self._crew.everywhere("slices", why)), "")

    def _cut(self, call: CalledWith, program: Program) -> None:
        """Cut and weigh a call here; if that fails in a step, the run ends."""
        intake, step = self._site.intake, Step(self._site.ledger.number, train=False)
        with put_in([(vars(intake), "num_microbatches", program.num_units)]):
            intake.take(
                step, intake.first_value(call.batch, call.named), call.target, self._site.engine.ends, self._crew
            )
            self._site.cut(step)

    def _loss(self, call: CalledWith, program: Program) -> Tensor | None:
        """Return the loss of forwards alone, which is the same on all ranks."""
        ledger = self._site.ledger
        step = Step(ledger.number, train=False, draw=ledger.num_trained, instead=program)
        self._site.choice.run_instead(step)
        with self._site.recording.between.during("evaluate"):
            return self._site.evaluate(step, call).loss

    def _refusal(self, call: CalledWith, number: int) -> str:
        """Return why nothing like this call runs in slices here; empty if it may."""
        if self._why_not:
            return self._why_not
        try:
            self._site.refuse(slices=number)
        except DrumlineError as error:
            return error.expected if error.error.startswith("slices") else f"{error.error}; {error.expected}"
        if self._known.counted and (self._known.name in call.named or self._known.place < len(call.batch)):
            return f"steps pass {self._known.name}, of which the model makes masks"
        return ""

    @property
    def _known(self) -> Takes:
        assert self._takes is not None, "a model that is refused is not divided"
        return self._takes

    @property
    def _num_microbatches(self) -> int:
        return self._site.frozen.program.num_microbatches

    def _divided(self, call: CalledWith, number: int) -> tuple[CalledWith, str]:
        """Return a call in units, or why its sequences do not divide."""
        try:
            return in_units(call, self._known, SliceLengths(number), self._num_microbatches), ""
        except BatchError as error:
            return call, error.error

    def _divide(self, number: int) -> None:
        """Have the next step in so many slices."""
        self._calls.division = SliceLengths(number)
        self._site.intake.num_slices = self._site.engine.assembly.randomness.alike = number

    def _follow(self) -> None:
        """Follow the stages that are here now."""
        for stage in self._site.engine.stages():
            if not any(stage is followed for followed in self._followed):
                follow(stage, self._calls)
        self._followed = list(self._site.engine.stages())
