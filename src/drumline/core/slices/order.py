"""The rule of slices, and what a row of them holds.

A microbatch whose sequences are divided into S slices is S units: unit m*S + s is slice s of microbatch m. A program
over units is a program like any other, so proof, simulation and execution go over units. Slices add one rule::

    on every stage, slices of a microbatch go forward in order and backward in reverse

because a slice attends to the keys and values of those before it, whose gradients are complete once it has gone back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drumline.core.action import Action, Op
from drumline.core.errors import ProgramError, counted
from drumline.core.program import Program
from drumline.core.prove.violation import Violation

_BACK = (Op.BACKWARD, Op.BACKWARD_INPUT)  # what brings gradients of keys and values
_FREES = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


def order_violations(program: Program, num_slices: int) -> Iterator[Violation]:
    r"""Yield every action that runs before a slice that it needs.

    >>> [str(v.reason) for v in order_violations(Program.parse("0F1,0F0,0B1,0B0"), 2)]
    ['slice 1 of microbatch 0 goes forward before slice 0']
    >>> [str(v.reason) for v in order_violations(Program.parse("0F0,0F1,0B0,0B1"), 2)]
    ['slice 0 of microbatch 0 goes backward before slice 1']
    """
    if program.num_microbatches % num_slices:
        raise ProgramError(
            f"program {program.name!r} has {counted(program.num_microbatches, 'unit')} for {num_slices} slices",
            expected="as many units for each microbatch",
        )
    for rank, row in enumerate(program.rows):
        gone: set[tuple[int, bool, int]] = set()  # stage, whether backward, unit
        for index, action in enumerate(row):
            for part in action.work:
                is_back = part.op in _BACK
                if part.microbatch is None or not (is_back or part.op is Op.FORWARD):
                    continue
                microbatch, number = divmod(part.microbatch, num_slices)
                needed = number + 1 if is_back else number - 1
                if 0 <= needed < num_slices and (part.stage, is_back, microbatch * num_slices + needed) not in gone:
                    way = "backward" if is_back else "forward"
                    reason = f"slice {number} of microbatch {microbatch} goes {way} before slice {needed}"
                    yield Violation(rank, index, action, reason)
                gone.add((part.stage, is_back, part.microbatch))


def peak_bytes(row: Iterable[Action], num_slices: int, unit_bytes: float, owed_bytes: float) -> float:
    """Return the most bytes that a row holds after an action: of units, and gradients of keys and values.

    A unit holds `unit_bytes` from F until B or W. From the first backward of a microbatch until its last, each stage
    holds `owed_bytes`: the gradients of all its keys and values.

    >>> row = Program.parse("0F0,0F1,0F2,0B1,0F3,0B0,0B3,0B2").rows[0]
    >>> peak_bytes(row, 2, 10.0, 3.0)
    33.0
    """
    stash = owed = most = 0.0
    for action in row:
        for part in action.work:
            assert part.microbatch is not None, f"{part} belongs to no unit"
            number = part.microbatch % num_slices
            stash += unit_bytes * ((part.op is Op.FORWARD) - (part.op in _FREES))
            if part.op in _BACK and num_slices > 1:
                owed += owed_bytes * ((number == num_slices - 1) - (number == 0))
            most = max(most, stash + owed)
    return most
