"""Which program a step runs by: the pipeline's own, one that the step names, or one that is taken up from then on.

::

    run_by          the step names a program, for itself alone
    run_instead     what adapts has one for a batch of fewer rows than microbatches, for this step alone
    take            what adapts takes up another before a step, where it pays
    take_program    the user takes up another between two steps
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.core.errors import DrumlineError, MismatchError, ProgramError, UsageError, counted
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram
from drumline.engine.ground import Ground
from drumline.engine.program.find import program_for
from drumline.engine.program.programs import digest_of
from drumline.engine.ranks.observer import Observers
from drumline.engine.together import program_facts
from drumline.runtime.step import Step
from drumline.schedules import find


class ProgramChoice:
    """Chooses the program of a pipeline's steps, and lets engine and intake run by it."""

    def __init__(self, ground: Ground) -> None:
        self._crew, self._engine, self._intake = ground.crew, ground.engine, ground.intake
        self._programs, self._frozen, self._recording = ground.programs, ground.frozen, ground.recording
        self._refuse, self.observers = ground.refuse, Observers(())

    def run_by(self, step: Step, program: str | Program | None) -> None:
        """Have a step run by the program that it names, or by the pipeline's own; all ranks call it alike."""
        own_number = self._programs.own_number
        if self._programs[own_number].num_updates:
            self._refuse(program=program)
        with self._crew.together("the choice of a program"):
            number = self._programs.number_of(program)
            if number != own_number:
                self._refuse(program=program)
            step.program = number
            if number != self._engine.number:
                self._switch(number)

    def run_instead(self, step: Step) -> None:
        """Have a step run by the program that it needs instead of the pipeline's own; all ranks call it alike."""
        with self._crew.together("the choice of a program"):
            step.program = self._programs.number_of(step.instead)
            self._switch(step.program)

    def _switch(self, number: int) -> None:
        program = self._programs[number]
        self._engine.run_by(number, program)
        self._intake.num_microbatches = program.num_units

    def take(self, program: Program) -> None:
        """Run by another program from the next step on; all ranks call it with the same one, which is proven."""
        self._recording.settle()
        self._programs.own_number = self._programs.number_of(program)
        self._frozen.pruned(program)
        self._switch(self._programs.own_number)
        for observer in self.observers.each:
            observer.took(program, self._programs.own_number)

    def take_program(self, choice: Any, num_microbatches: int | None) -> Program:
        """Run by another program from the next step on, once all ranks have proven the same one."""
        mine: str | DrumlineError
        try:
            program = self._proven(choice, num_microbatches)
            mine = digest_of(program)
        except DrumlineError as error:
            mine = error
        with self._crew.together("taking up a program"):
            answers = self._crew.everywhere("program", mine)
        for drumline_error in answers:
            if isinstance(drumline_error, DrumlineError):
                raise drumline_error
        if len(set(answers)) > 1:
            raise MismatchError("ranks were given different programs to take up", expected="the same on every rank")
        with self._crew.together("taking up a program"):
            self.take(program)
        return self._frozen.program

    def _proven(self, choice: Any, num_microbatches: int | None) -> Program:
        """Return the program that a user means, if these stages can run it and it stays within the limit."""
        now = self._programs[self._programs.own_number]
        if not isinstance(choice, str | Path | Program):
            raise UsageError(
                f"the program to take up is {choice!r:.60}", expected="a schedule, a Program or a CSV file"
            )
        named, stages_per_rank = (
            isinstance(choice, str) and not choice.endswith(".csv"),
            now.num_stages // now.num_ranks,
        )
        if isinstance(choice, str) and named and not find(choice).admits_stages(stages_per_rank):
            raise ProgramError(
                f"{choice} cannot use {counted(stages_per_rank, 'stage')} per rank, which this pipeline has",
                expected="a schedule for the same stages in the same places, so that nothing moves between two steps",
                fix=f"make another pipeline for it: Pipeline(..., schedule={choice!r})",
            )
        program = program_for(
            choice,
            num_ranks=now.num_ranks,
            num_microbatches=now.num_microbatches if named and num_microbatches is None else num_microbatches,
            stages_per_rank=stages_per_rank,
        )
        self._refuse(call="take_program", **program_facts(now if now.num_updates else program))
        if violations := validate(program):
            raise InvalidProgram(program.name, violations)
        for observer in self.observers.each:
            observer.refuse_program(program)
        self._engine.refuse(self._programs[self._programs.number_of(program)])
        return program
