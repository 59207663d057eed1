"""Where one step ends and the next begins, if neither the profiler nor labels say: where the pipeline is empty.

    rank 0   F F B F B F B B │ F F B B          a step is over once every rank has run as many backwards as
    rank 1     F B F B F B F B │ F B F B        forwards, and all of them as many: here after 4, and after 6

The last rank is empty after every backward, so one rank alone does not tell. Between two steps, what is sent belongs
to the one before; the first receive, or else the next action, begins the one behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.memory import holdings
from drumline.report.kineto.actions import Labelled
from drumline.report.kineto.calls import Call


def flush_counts(rows: Sequence[Sequence[Labelled]]) -> list[int]:
    """Return after how many microbatches all ranks had run every backward; `rows` are ranks' forwards and backwards."""
    common: set[int] | None = None
    for row in rows:
        held, done, empty = 0, 0, set[int]()
        for one in row:
            forward = one.action.op is Op.FORWARD
            held, done = held + (1 if forward else -1), done + (not forward)
            if held == 0:
                empty.add(done)
        common = empty if common is None else common & empty
    return sorted(common or ())


class Stretch(NamedTuple):
    """A step of one rank as the host saw it: its actions, from when to when."""

    labelled: list[Labelled]
    start: int
    end: int


def cut(
    row: Sequence[Labelled], counts: Sequence[int], calls: Sequence[Call], bounds: tuple[int, int]
) -> dict[int, Stretch]:
    """Return a rank's steps, microbatches counted anew in each; behind the last flush there may be one that is cut."""
    receives = sorted(call.start for call in calls if not call.sends)
    found: dict[int, Stretch] = {}
    first, start, last = 0, bounds[0], bounds[1] + 1
    for number, (before, count) in enumerate(pairwise([0, *counts, len(row)])):
        behind = 2 * count if number < len(counts) else len(row)
        if first == behind:
            break
        after = [row[behind].start] if behind < len(row) else []
        after += receives[bisect_left(receives, row[behind - 1].end) :][:1]
        end = min([*after, last])
        found[number] = Stretch([_earlier(one, before) for one in row[first:behind]], start, end)
        first, start = behind, end
    return found


def _earlier(labelled: Labelled, by: int) -> Labelled:
    assert labelled.action.microbatch is not None
    return labelled._replace(action=labelled.action._replace(microbatch=labelled.action.microbatch - by))


def num_flushes(program: Program) -> int:
    r"""Return how often all ranks of a program hold nothing at the same point of their rows, its end included.

    >>> once, twice = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1"
    >>> num_flushes(Program.parse(once)), num_flushes(Program.parse(twice))
    (1, 2)
    """
    common: set[Fraction] | None = None
    for row, holding in zip(program.rows, holdings(program, Costs()), strict=True):
        started = [sum(part.op is Op.FORWARD for part in action.work) for action in row if action.is_compute]
        total, done, empty = sum(started), 0, set[Fraction]()
        for forwards, (_, after) in zip(started, holding.pairs, strict=True):
            done += forwards
            if after == 0 and total:
                empty.add(Fraction(done, total))
        common = empty if common is None else common & empty
    return max(len(common or ()), 1) if program.has_backward else 1
