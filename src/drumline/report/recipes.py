"""Programs that schedules make for given counts, and which schedule a program is: the one that makes the same rows."""

from __future__ import annotations

from dataclasses import replace

from drumline.core.errors import DrumlineError
from drumline.core.program import Program
from drumline.schedules import find, schedules

# Beyond this, making every schedule for comparison takes longer than it is worth; larger steps repeat themselves.
_MOST_ACTIONS = 50_000


def made_by(name: str, program: Program, num_microbatches: int | None = None) -> Program | None:
    """Return what a schedule makes for the counts of a program, or others; None where it does not admit them."""
    stages_per_rank, rest = divmod(program.num_stages, max(program.num_ranks, 1))
    count = program.num_microbatches if num_microbatches is None else num_microbatches
    if rest or not count or program.num_actions * count > _MOST_ACTIONS * program.num_microbatches:
        return None
    try:
        schedule = find(name)
        if (schedule.stages_per_rank > 1) != (stages_per_rank > 1):
            return None  # a recipe for several stages per rank, with one, is another schedule
        return schedule.build(program.num_ranks, count, stages_per_rank)
    except DrumlineError:
        return None


def recipe_of(program: Program) -> Program:
    r"""Return the program under the name of the schedule that makes its rows; as it is where none does.

    >>> recipe_of(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")).name
    '1f1b'
    """
    for name in schedules():
        made = made_by(name, program)
        if made is not None and made.rows == program.rows:
            return replace(program, name=name)
    return program
