"""Slices of sequences in the order of any schedule: forwards in order, backwards of a microbatch in reverse.

    1f1b, 2 ranks, 2 microbatches in 3 slices: units 0 1 2 | 3 4 5

    rank 0 |F0 F1 F2 F3 B2 F4 B1 F5 B0 B5 B4 B3 |      P-1-r + S-1 forwards ahead
    rank 1 |.. F0 F1 F2 B2 F3 B1 F4 B0 F5 B5 B4 B3 |

A schedule is built for units as if they were microbatches. Its k-th backward of a microbatch then becomes that of the
k-th slice from the end. All forwards run earlier by as many as that needs: S-1 where a rank holds one stage. For 1f1b
this is the order of Seq1F1B (arXiv 2406.03488).
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.action import Action, Op
from drumline.core.errors import ScheduleError
from drumline.core.program import Program, Row

_BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})


def mirrored(unit: int, num_slices: int) -> int:
    """Return the unit that is as far from the end of its microbatch as this one is from the beginning.

    >>> [mirrored(unit, 3) for unit in range(6)]
    [2, 1, 0, 5, 4, 3]
    """
    return unit - unit % num_slices * 2 + num_slices - 1


def sliced(program: Program, num_slices: int) -> Program:
    r"""Return a flushed program over units, whose microbatches so many slices form.

    >>> print(sliced(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"), 2))
    0F0,0F1,0B1,0B0
    1F0,1F1,1B1,1B0
    """
    rows = [[_mirrored(action, num_slices) for action in row] for row in program.rows]
    if num_slices == 1:
        return program
    if program.num_microbatches % num_slices:
        raise ScheduleError(
            f"program {program.name!r} has {program.num_microbatches} units for {num_slices} slices",
            expected="a multiple of it",
        )
    for row in rows:
        other = next((action for action in row if action.op is not Op.FORWARD and action.op not in _BACKWARDS), None)
        if other is not None:
            raise ScheduleError(
                f"program {program.name!r} has {other}, and its sequences are divided into slices",
                expected="a flushed schedule of F, B, I and W alone",
                fix="use 1f1b, gpipe, interleaved-1f1b or zb-h1",
            )
    earlier = max(map(_lack, rows))
    return Program.of((_with_forwards_earlier(row, earlier) for row in rows), f"{program.name} in {num_slices} slices")


def _mirrored(action: Action, num_slices: int) -> Action:
    if action.op not in _BACKWARDS or action.microbatch is None:
        return action
    return action._replace(microbatch=mirrored(action.microbatch, num_slices))


def _lack(row: Sequence[Action]) -> int:
    """Return by how many forwards a row is late: each backward comes after its own forward."""
    forwards = [action for action in row if action.op is Op.FORWARD]
    place = {(action.stage, action.microbatch): at for at, action in enumerate(forwards, start=1)}
    lack = count = 0
    for action in row:
        if action.op is Op.FORWARD:
            count += 1
        else:
            lack = max(lack, place[action.stage, action.microbatch] - count)
    return lack


def _with_forwards_earlier(row: Sequence[Action], earlier: int) -> Row:
    """Return a row whose other actions come after so many more forwards than before."""
    forwards = [action for action in row if action.op is Op.FORWARD]
    result: list[Action] = []
    count = taken = 0
    for action in row:
        if action.op is Op.FORWARD:
            count += 1
            continue
        result += forwards[taken : count + earlier]
        taken = max(taken, min(count + earlier, len(forwards)))
        result.append(action)
    return (*result, *forwards[taken:])
