"""Where a search begins: every hand-made schedule of the placement, and one microbatch after another.

A search is never worse than the best of these that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from drumline.core.errors import ScheduleError
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.plan.search.bounds.instance import B, F, I, Instance, Rows, W
from drumline.plan.search.objective import Objective
from drumline.schedules import schedules
from drumline.schedules.formulas import Pace, Paces
from drumline.schedules.registry import Schedule

_FEW = 2  # schedules that are built even if it is late


@dataclass(frozen=True, slots=True)
class Start:
    """A program to begin with: its value, and its rows if the search can change them."""

    name: str
    program: Program
    value: float
    rows: Rows | None


def starts(instance: Instance, objective: Objective, *, is_late: Callable[[], bool] = lambda: False) -> list[Start]:
    """Return every start that fits the limit, the best first; if `is_late`, only what is made by then.

    Even then, the most promising schedule that fits is among them, if one of the first few does.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.timeline.idle import Limit
    >>> from drumline.core.placement import Placement
    >>> one = Instance(Costs(), Placement.linear(4), 8, Limit(max_activations=4))
    >>> [(start.name, start.value) for start in starts(one, Objective(one))][:4]
    [('zb-h1', 27.0), ('interleaved-zb', 27.0), ('1f1b', 33.0), ('one by one', 72.0)]
    >>> [start.name for start in starts(one, Objective(one), is_late=lambda: True)]
    ['zb-h1', 'one by one', 'one by one, joined']
    """
    found: dict[int, Start] = {}
    num_built = 0
    plainest = [Program(instance.plain.rows, "one by one"), Program(instance.joined.rows, "one by one, joined")]
    for place, program in chain(enumerate(plainest), _hand_made(instance, len(plainest))):
        num_built += place >= len(plainest)
        if found and is_late() and (max(found) >= len(plainest) or num_built > _FEW):
            break
        rows = instance.rows_of(program) if program.placement == instance.placement else None
        # Proving a large program takes seconds; a recipe's program is legal, so only its memory is checked here.
        fits = all(instance.fits(row, rank) for rank, row in enumerate(rows or ()))
        if not fits or (rows is None and validate(program, limit=instance.limit, costs=instance.costs)):
            continue
        value = _value(instance, objective, program, rows)
        if value is not None:
            found[place] = Start(program.name, program, value, rows)
    return [found[place] for place in sorted(found, key=lambda place: (found[place].value, place))]


def _hand_made(instance: Instance, first: int) -> Iterator[tuple[int, Program]]:
    """Yield every schedule's program for these counts, if its placement is the requested one, with its place.

    The fastest come first, by their formulas for equal ranks; places follow the registry, from `first` on.
    """
    placement, per_rank = instance.placement, instance.num_stages // instance.num_ranks
    counts = instance.num_ranks, instance.num_microbatches, per_rank

    each = [sum(instance.seconds[op::4]) / instance.num_microbatches / instance.num_ranks for op in (F, I, W)]
    paces = Paces([Pace(instance.num_ranks, *each)], instance.num_microbatches, per_rank)

    def promise(one: tuple[int, Schedule]) -> float:
        return math.inf if one[1].makespan is None else one[1].makespan(paces)

    known = [one for one in enumerate(schedules().values(), first) if one[1].refusal(*counts) is None]
    for place, schedule in sorted(known, key=promise):
        if not schedule.trains or not schedule.flushed or schedule.two_directions != bool(placement.mirrored):
            continue
        try:
            if not placement.mirrored and schedule.layout(instance.num_ranks, per_rank) != placement:
                continue
            program = schedule.build(*counts)
        except ScheduleError:
            continue
        if not program.has_backward or program.num_updates or program.placement.name != placement.name:
            continue
        if placement.mirrored or program.placement == placement:
            yield place, program


def _value(instance: Instance, objective: Objective, program: Program, rows: Rows | None) -> float | None:
    if rows is not None:
        measured = objective.measure(rows)
        return None if measured is None else measured.value
    if objective.name == "steady" or objective.jitter is not None:
        return None  # only rows of our own can be measured this way
    timeline = simulate(program, instance.costs)
    return timeline.makespan if objective.name == "makespan" else timeline.span


def split(rows: Rows) -> Rows:
    """Return the rows with every whole backward split into its two halves.

    >>> split([[4, 7]])
    [[4, 5, 6]]
    """
    return [[one for n in row for one in ((n - B + I, n - 1) if n % 4 == B else (n,))] for row in rows]
