"""Where a search begins: every hand-made schedule of the placement, and one microbatch after another.

A search is never worse than the best of these that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drumline.core.errors import ScheduleError
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.plan.search.instance import B, I, Instance, Rows
from drumline.plan.search.objective import Objective
from drumline.schedules import schedules


@dataclass(frozen=True, slots=True)
class Start:
    """A program to begin with: its value, and its rows where the search can change them."""

    name: str
    program: Program
    value: float
    rows: Rows | None


def starts(instance: Instance, objective: Objective) -> list[Start]:
    """Return every start that fits the limit, the best first.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.timeline.idle import Limit
    >>> from drumline.core.placement import Placement
    >>> one = Instance(Costs(), Placement.linear(4), 8, Limit(max_activations=4))
    >>> [(start.name, start.value) for start in starts(one, Objective(one))][:4]
    [('zb-h1', 27.0), ('interleaved-zb', 27.0), ('1f1b', 33.0), ('one by one', 72.0)]
    """
    found = []
    plainest = [Program(instance.plain.rows, "one by one"), Program(instance.joined.rows, "one by one, joined")]
    for program in (*plainest, *_hand_made(instance)):
        rows = instance.rows_of(program) if program.placement == instance.placement else None
        # Proving a large program takes seconds; what a recipe makes is legal, so here only its memory is in question.
        fits = all(instance.fits(row, rank) for rank, row in enumerate(rows or ()))
        if not fits or (rows is None and validate(program, limit=instance.limit, costs=instance.costs)):
            continue
        value = _value(instance, objective, program, rows)
        if value is not None:
            found.append(Start(program.name, program, value, rows))
    return sorted(found, key=lambda start: start.value)


def _hand_made(instance: Instance) -> Iterator[Program]:
    """Yield what every schedule makes for these counts, where its stages lie as asked."""
    placement, per_rank = instance.placement, instance.num_stages // instance.num_ranks
    for schedule in schedules().values():
        if schedule.refusal(instance.num_ranks, instance.num_microbatches, per_rank) is not None:
            continue
        try:
            program = schedule.build(instance.num_ranks, instance.num_microbatches, per_rank)
        except ScheduleError:
            continue
        if not program.has_backward or program.num_updates or program.placement.name != placement.name:
            continue
        if placement.mirrored or program.placement == placement:
            yield program


def _value(instance: Instance, objective: Objective, program: Program, rows: Rows | None) -> float | None:
    if rows is not None:
        measured = objective.measure(rows)
        return None if measured is None else measured.value
    if objective.name == "steady" or objective.jitter is not None:
        return None  # only rows of our own can be measured so
    timeline = simulate(program, instance.costs)
    return timeline.makespan if objective.name == "makespan" else timeline.span


def split(rows: Rows) -> Rows:
    """Return the rows with every whole backward as its two halves.

    >>> split([[4, 7]])
    [[4, 5, 6]]
    """
    return [[one for n in row for one in ((n - B + I, n - 1) if n % 4 == B else (n,))] for row in rows]
