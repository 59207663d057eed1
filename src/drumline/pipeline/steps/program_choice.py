"""Which program a step runs by: the pipeline's own, one that the step names, or one that is taken up from then on.

run_by          the step names a program, for itself alone
adapt           schedule="auto" and `adapt` take up another before a step, where it pays
take_program    the user takes up another between two steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.adapt.move import Move
from drumline.core.errors import DrumlineError, MismatchError, ProgramError, UsageError, counted
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram
from drumline.core.timeline.idle import Limit
from drumline.engine.program.find import program_for
from drumline.engine.program.frozen import Frozen
from drumline.engine.program.programs import Programs, digest_of
from drumline.engine.ranks.crew import Crew
from drumline.engine.stages.engine import Engine
from drumline.engine.stages.intake import Intake
from drumline.features.adapt.adapting import Adapting
from drumline.features.adapt.auto_schedule import AutoSchedule
from drumline.features.record.recording import Recording
from drumline.features.stream.stream import Stream
from drumline.runtime.step import Step
from drumline.schedules import find


@dataclass(frozen=True, slots=True, eq=False)
class ProgramChoice:
    """Chooses the program of a pipeline's steps, and lets engine and intake run by it."""

    crew: Crew
    programs: Programs
    frozen: Frozen
    engine: Engine
    intake: Intake
    recording: Recording
    stream: Stream | None
    auto: AutoSchedule | None
    adapting: Adapting | None

    def run_by(self, step: Step, program: str | Program | None) -> None:
        """Have a step run by the program that it names, or by the pipeline's own; all ranks call it alike."""
        own = step.program = self.programs.own
        if program is None and self.engine.number == own:
            return
        if self.stream is not None:
            raise UsageError(
                f"a step names a program, and {self.stream.name} has no flush", expected="one schedule in all steps"
            )
        with self.crew.together("the choice of a program"):
            number = self.programs.number_of(program)
            why = self.engine.runs_one_program or ("schedule='auto'" if self.auto is not None else "")
            if number != own and why:
                raise UsageError(
                    f"a step names a program, and the pipeline was made with {why}",
                    expected="one program in all steps there",
                )
            step.program = number
            if number != self.engine.number:
                self._switch(number)

    def _switch(self, number: int) -> None:
        program = self.programs[number]
        self.engine.run_by(number, program)
        self.intake.num_microbatches = program.num_microbatches

    def adapt(self, step: Step, move: Callable[..., Move]) -> None:
        """Change the program or the cut before a step, where `schedule="auto"` or `adapt` find that it pays."""
        if self.auto is not None and not self.auto.is_over:
            self.auto.before(step, self.take)
        elif self.adapting is not None:
            self.adapting.before(step, self.take, move)

    def take(self, program: Program) -> None:
        """Run by another program from the next step on; all ranks call it with the same one, which is proven."""
        self.recording.settle()
        self.programs.own = self.programs.number_of(program)
        self.frozen.pruned(program)
        self._switch(self.programs.own)
        if self.adapting is not None:
            self.adapting.took_up(program, self.programs.own)

    def take_program(self, given: Any, num_microbatches: int | None) -> Program:
        """Run by another program from the next step on, once all ranks have proven the same one."""
        mine: str | DrumlineError
        try:
            program = self._proven(given, num_microbatches)
            mine = digest_of(program)
        except DrumlineError as error:
            mine = error
        with self.crew.together("taking up a program"):
            told = self.crew.everywhere("program", mine)
        for one in told:
            if isinstance(one, DrumlineError):
                raise one
        if len(set(told)) > 1:
            raise MismatchError("ranks were given different programs to take up", expected="the same on every rank")
        with self.crew.together("taking up a program"):
            self.take(program)
        return self.frozen.program

    def _proven(self, given: Any, num_microbatches: int | None) -> Program:
        """Return the program that a user means, if these stages can run it and it stays within the limit."""
        now = self.programs[self.programs.own]
        if not isinstance(given, str | Path | Program):
            raise UsageError(f"the program to take up is {given!r:.60}", expected="a schedule, a Program or a CSV file")
        named, stages_per_rank = isinstance(given, str) and not given.endswith(".csv"), now.num_stages // now.num_ranks
        if isinstance(given, str) and named and not find(given).admits_stages(stages_per_rank):
            raise ProgramError(
                f"{given} cannot use {counted(stages_per_rank, 'stage')} per rank, which this pipeline has",
                expected="a schedule for the same stages in the same places, so that nothing moves between two steps",
                fix=f"make a pipeline of its own for it: Pipeline(..., schedule={given!r})",
            )
        program = program_for(
            given,
            num_ranks=now.num_ranks,
            num_microbatches=now.num_microbatches if named and num_microbatches is None else num_microbatches,
            stages_per_rank=stages_per_rank,
        )
        if self.stream is not None or program.num_updates:
            raise UsageError(
                f"the program to take up is {program.name}, after {now.name}",
                expected="two flushed schedules: between their steps no microbatch is in flight",
            )
        limit = None if self.adapting is None else Limit(self.adapting.settings.max_activations)
        if violations := validate(program, limit=limit or None):
            raise InvalidProgram(program.name, violations)
        self.engine.refuse(self.programs[self.programs.number_of(program)])
        return program
