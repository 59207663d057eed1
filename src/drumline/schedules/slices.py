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
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from drumline.core.action import Op
from drumline.core.errors import ScheduleError
from drumline.core.graph import CODE, Columns, Ints
from drumline.core.program import Program

_FORWARD = CODE[Op.FORWARD]
_BACKWARDS = [CODE[op] for op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]


def number_of(slices: int | Sequence[int]) -> int:
    """Return the number of slices that somebody asks for, by it or by the lengths of each.

    >>> number_of(8), number_of([700, 500, 400])
    (8, 3)
    """
    counts = list(slices) if isinstance(slices, Sequence) else [slices]
    if not counts or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise ScheduleError(f"slices is {slices!r:.80}", expected="a number of slices, or the tokens of each")
    return len(counts) if isinstance(slices, Sequence) else counts[0]


def mirrored(unit: Ints, num_slices: int) -> Ints:
    """Return the units that are as far from the end of their microbatch as these are from the beginning.

    >>> mirrored(np.arange(6), 3).tolist()
    [2, 1, 0, 5, 4, 3]
    """
    return unit - unit % num_slices * 2 + num_slices - 1


def sliced(program: Program, num_slices: int) -> Program:
    r"""Return the order of a flushed program over units, for microbatches of so many slices.

    >>> print(sliced(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"), 2))
    0F0.0,0F0.1,0B0.1,0B0.0
    1F0.0,1F0.1,1B0.1,1B0.0
    """
    if num_slices == 1:
        return program
    if program.num_units % num_slices:
        raise ScheduleError(
            f"program {program.name!r} has {program.num_units} units for {num_slices} slices",
            expected="a multiple of it",
        )
    columns = program.columns
    back, forward = np.isin(columns.code, _BACKWARDS), columns.code == _FORWARD
    if not (back | forward).all() or columns.paired.any():
        cell = int(columns.cell[np.argmin((back | forward) & ~columns.paired)])
        other = next(islice(chain.from_iterable(program.rows), cell, None))
        raise ScheduleError(
            f"program {program.name!r} has {other}, and its sequences are divided into slices",
            expected="a flushed schedule of F, B, I and W alone",
            fix="use 1f1b, gpipe, interleaved-1f1b or zb-h1",
        )
    unit = np.where(back, mirrored(columns.microbatch, num_slices), columns.microbatch)
    order = _with_forwards_earlier(columns, unit, forward)
    numbers = (columns.stage[order], columns.code[order], unit[order])
    return Program.of_columns(
        replace(Columns.plain(columns.lengths, *numbers), num_slices=num_slices),
        f"{program.name}{_named(num_slices)}",
    )


def order_of(program: Program) -> str:
    """Return the name of the schedule whose order a program has, in slices or not.

    >>> from drumline.schedules import generate
    >>> order_of(generate("zb-h1", num_ranks=2, num_microbatches=2, slices=4))
    'zb-h1'
    """
    return program.name.removesuffix(_named(program.num_slices))


def _named(num_slices: int) -> str:
    return f" in {num_slices} slices"


def _with_forwards_earlier(columns: Columns, unit: Ints, forward: Ints) -> Ints:
    """Return the rows' order with other actions after so many more forwards that all follow their own forward."""
    first = np.cumsum((0, *columns.lengths))[columns.rank]
    before = np.cumsum(forward)
    count = before - np.append(0, before)[first]  # forwards in the row up to here
    place = np.zeros((int(columns.stage.max(initial=0)) + 1, int(unit.max(initial=0)) + 1), dtype=np.int64)
    place[columns.stage[forward], unit[forward]] = count[forward]
    late = np.where(forward, 0, place[columns.stage, unit] - count)
    after = np.where(forward, count, count + late.max(initial=0))
    return np.lexsort((~forward, after, columns.rank))
