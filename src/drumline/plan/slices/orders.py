"""Which schedules to try in slices, in how many, and for which programs: where microbatches are few against ranks."""

from __future__ import annotations

from drumline.core.errors import ScheduleError
from drumline.core.program import Program
from drumline.schedules import schedules

NUMBERS = (2, 4, 8, 16, 32, 64)
_FEW = 4  # microbatches for each rank: with as many, slices save little


def are_few(program: Program) -> bool:
    """Whether a program has so few microbatches that slices may save some of its bubble.

    >>> from drumline.schedules import generate
    >>> [are_few(generate("1f1b", num_ranks=2, num_microbatches=number)) for number in (7, 8)]
    [True, False]
    """
    return program.num_ranks > 1 and program.num_microbatches < _FEW * program.num_ranks


def is_tried(name: str) -> bool:
    """Whether a schedule is tried in slices: one whose order of slices has a formula.

    >>> is_tried("1f1b"), is_tried("zb-v"), is_tried("mine.csv")
    (True, False, False)
    """
    known = schedules().get(name)
    return known is not None and known.formula_in_slices


def orders_in_slices(program: Program, num_slices: int) -> list[Program]:
    """Return the programs of all schedules that are tried, in slices, for the stages of a program where they are.

    >>> from drumline.schedules import generate
    >>> [order.name for order in orders_in_slices(generate("zb-h2", num_ranks=2, num_microbatches=2), 4)]
    ['gpipe in 4 slices', '1f1b in 4 slices', 'zb-h1 in 4 slices']
    """
    counts = program.num_ranks, program.num_microbatches, program.num_stages // program.num_ranks
    orders = []
    for schedule in schedules().values():
        # With one stage per rank, a recipe for several is the same as another one.
        if not is_tried(schedule.name) or (schedule.stages_per_rank > 1) != (counts[2] > 1):
            continue
        try:
            order = schedule.build(*counts, slices=num_slices)
        except ScheduleError:
            continue
        if order.placement.homes == program.placement.homes:
            orders.append(order)
    return orders
