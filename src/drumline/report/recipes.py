"""Which schedule a program is: the recipe that makes the same rows."""

from __future__ import annotations

from dataclasses import replace

from drumline.core.errors import ScheduleError
from drumline.core.program import Program
from drumline.schedules import schedules

# Beyond this, making every schedule for comparison takes longer than it is worth.
_MOST_ACTIONS = 50_000


def recipe_of(program: Program) -> Program:
    r"""Return the program under the name of the schedule that makes its rows; as it is where none does.

    >>> recipe_of(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")).name
    '1f1b'
    """
    if not program.num_ranks or program.num_actions > _MOST_ACTIONS:
        return program
    stages_per_rank, rest = divmod(program.num_stages, program.num_ranks)
    if rest or not program.num_microbatches:
        return program
    for name, schedule in schedules().items():
        if schedule.refusal(program.num_ranks, program.num_microbatches, stages_per_rank) is not None:
            continue
        try:
            made = schedule.build(program.num_ranks, program.num_microbatches, stages_per_rank)
        except ScheduleError:
            continue
        if made.rows == program.rows:
            return replace(program, name=name)
    return program
