"""Where a search begins: every hand-made schedule of the placement, and one microbatch after another.

A search is never worse than the best of these that fits. A result for fewer microbatches is another start: its repeated
middle is repeated more often.

    few    |F0 F1 F2 I0 F3 I1 W0 | F4 I2 W1 | I3 W2 I4 W3 W4 |
    more   |F0 F1 F2 I0 F3 I1 W0 | F4 I2 W1   F5 I3 W2   F6 I4 W3 | I5 W4 I6 W5 W6 |

From some moment on, every rank's next few actions contain one forward and one backward of each stage: that is a period.
It is repeated for every additional microbatch, and later microbatches are renumbered. Timing shows whether the result
is any good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from drumline.core.errors import ScheduleError
from drumline.core.graph import Ints
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.plan.search.bounds.instance import B, F, I, Instance, Rows, W
from drumline.plan.search.objective import Objective
from drumline.plan.search.row_times import clock
from drumline.schedules import schedules
from drumline.schedules.formulas import Pace, Paces
from drumline.schedules.registry import Schedule

_MOMENTS = 16
_FEW = 2  # schedules that are built even if it is late

Step = tuple[int, int]  # (stage, op)


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
    >>> value = Instance(Costs(), Placement.linear(4), 8, Limit(max_activations=4))
    >>> [(start.name, start.value) for start in starts(value, Objective(value))][:4]
    [('zb-h1', 27.0), ('interleaved-zb', 27.0), ('1f1b', 33.0), ('one by one', 72.0)]
    >>> [start.name for start in starts(value, Objective(value), is_late=lambda: True)]
    ['zb-h1', 'one by one', 'one by one, joined']
    """
    starts_by_size: dict[int, Start] = {}
    num_built = 0
    plainest = [
        Program.of_columns(program.columns, name)
        for program, name in ((instance.plain, "one by one"), (instance.joined, "one by one, joined"))
    ]
    for place, program in chain(enumerate(plainest), _hand_made(instance, len(plainest))):
        num_built += place >= len(plainest)
        if starts_by_size and is_late() and (max(starts_by_size) >= len(plainest) or num_built > _FEW):
            break
        rows = instance.rows_of(program) if program.placement == instance.placement else None
        # Proving a large program takes seconds; a recipe's program is legal, so only its memory is checked here.
        fits = all(instance.fits(row, rank) for rank, row in enumerate(rows or ()))
        if not fits or (rows is None and validate(program, limit=instance.limit, costs=instance.costs)):
            continue
        value = _value(instance, objective, program, rows)
        if value is not None:
            starts_by_size[place] = Start(program.name, program, value, rows)
    return [
        starts_by_size[place]
        for place in sorted(starts_by_size, key=lambda place: (starts_by_size[place].value, place))
    ]


def _hand_made(instance: Instance, first: int) -> Iterator[tuple[int, Program]]:
    """Yield every schedule's program for these counts, if its placement is the requested one, with its place.

    The fastest come first, by their formulas for equal ranks; places follow the registry, from `first` on.
    """
    placement, per_rank = instance.placement, instance.num_stages // instance.num_ranks
    counts = instance.num_ranks, instance.num_microbatches, per_rank

    each = [sum(instance.seconds[op::4]) / instance.num_microbatches / instance.num_ranks for op in (F, I, W)]
    paces = Paces([Pace(instance.num_ranks, *each)], instance.num_microbatches, per_rank)

    def promise(pair: tuple[int, Schedule]) -> float:
        return math.inf if pair[1].makespan is None else pair[1].makespan(paces)

    known = [pair for pair in enumerate(schedules().values(), first) if pair[1].refusal(*counts) is None]
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
    return [[number for n in row for number in ((n - B + I, n - 1) if n % 4 == B else (n,))] for row in rows]


def stretched(
    few: Instance, rows: Rows, more: Instance, *, is_late: Callable[[], bool] = lambda: False
) -> Iterator[Rows]:
    """Yield the rows for all of `more`'s microbatches, once for every moment from which the program is periodic.

    It ends when it `is_late`.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> from drumline.schedules import generate
    >>> few, more = (Instance(Costs(), Placement.linear(2), count) for count in (6, 9))
    >>> rows = few.rows_of(generate("zb-h1", num_ranks=2, num_microbatches=6))
    >>> more.program(next(stretched(few, rows, more))) == generate("zb-h1", num_ranks=2, num_microbatches=9)
    True
    """
    times = clock(few)(rows, [0.0] * few.num_ranks)
    assert times is not None, "only a program that runs can be stretched"
    ends, ready = times
    last = max(end for _, end in ends)
    arrived = np.array(ready)
    each = [np.array(row) for row in rows]
    starts_of_rows = [
        arrived[np.where(row % 4 == B, row - B + I, row)] - few.latencies.ravel()[row] - few.times.ravel()[row]
        for row in each
    ]
    seen_rows = set()
    for moment in range(_MOMENTS):
        if is_late():
            return
        begin = last * (0.2 + 0.6 * moment / _MOMENTS)
        cuts = tuple(int(np.append(started >= begin, True).argmax()) for started in starts_of_rows)
        if cuts in seen_rows:
            continue
        seen_rows.add(cuts)
        new_rows = []
        for row, cut in zip(each, cuts, strict=True):
            new_row = _repeated(few, row, cut, more)
            if new_row is None:
                break
            new_rows.append(new_row.tolist())
        else:
            yield new_rows


def _repeated(few: Instance, row: Ints, cut: int, more: Instance) -> Ints | None:
    """Return the row with the period at `cut` repeated; None if there is none."""
    stage, op = row // 4 // few.num_microbatches, row % 4
    length = _period(list(zip(stage.tolist(), op.tolist(), strict=True)), cut)
    if length is None:
        return None
    again = np.tile(np.arange(cut, cut + length), more.num_microbatches - few.num_microbatches)
    longer = np.concatenate((np.arange(cut), again, np.arange(cut, len(row))))
    stage, op = stage[longer], op[longer]
    turn = np.zeros(len(longer), dtype=np.int64)
    for number in np.unique(stage).tolist():
        here = stage == number
        forwards, backwards = (np.flatnonzero(here & chosen) for chosen in (op == F, (op == I) | (op == B)))
        turn[forwards], turn[backwards] = np.arange(len(forwards)), np.arange(len(backwards))
        # Whole and split backwards share a count, and every W is that of the first I that waits for its own.
        turn[here & (op == W)] = turn[here & (op == I)]
    numbers: Ints = 4 * (stage * more.num_microbatches + turn) + op
    return numbers


def _period(word: list[Step], cut: int) -> int | None:
    """Return how many actions from `cut` on contain one forward and one backward, whole or split, of every stage.

    >>> _period([(0, F), (0, F), (0, B), (0, F), (0, I), (0, W)], 1)
    2
    """
    seen_microbatches: dict[int, set[int]] = {stage: set() for stage, _ in word}
    for length, (stage, op) in enumerate(word[cut:], start=1):
        if op in seen_microbatches[stage]:
            return None
        seen_microbatches[stage].add(op)
        if all(ops in ({F, B}, {F, I, W}) for ops in seen_microbatches.values()):
            return length
    return None
