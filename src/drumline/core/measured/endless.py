"""Make a step of endless rows whole, so that it can be simulated: with what came before it and comes after it.

    a step of a schedule without a flush     0F2 0B1 0F3 0B2 0UPDATE1
    whole                                    0F0 0B0 0F1 | 0F2 0B1 0F3 0B2 0UPDATE1 | 0B3 0UPDATE3

What is added takes no time, and holds no more than what is in flight when the step begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.action import Action, Op
from drumline.core.program import Program
from drumline.core.prove.validate import validate

_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)


def is_part(program: Program) -> bool:
    """Whether a program is a step of endless rows, and no program by itself.

    >>> is_part(Program.parse("0F2,0B1,0F3,0B2,0UPDATE1")), is_part(Program.parse("0F0,0B0,0UPDATE0"))
    (True, False)
    """
    return bool(program.num_updates or program.name.endswith(" step")) and bool(validate(program))


def whole(program: Program, in_flight: Sequence[int] | None = None) -> tuple[Program, list[list[bool]]]:
    """Return a whole program around a step, and for every row which actions are the step's own.

    `in_flight` says how many microbatches each rank has in flight when the step begins, for rows without a backward.

    >>> made, own = whole(Program.parse("0F2,0B1,0F3,0B2,0UPDATE1"))
    >>> print(made); own[0].count(True)
    0F0,0B0,0F1,0F2,0B1,0F3,0B2,0UPDATE1,0B3,0UPDATE3
    5
    """
    rows, own = [], []
    count = program.num_microbatches
    for rank, row in enumerate(program.rows):
        stage = row[0].stage
        there = {(one.op, one.microbatch) for one in row}
        back = next((one.op for other in program.rows for one in other if one.stage == stage and one.op in _BACKWARDS),
                    Op.BACKWARD)  # fmt: skip
        begun = min(one.microbatch or 0 for one in row if one.op is Op.FORWARD)
        known = begun if in_flight is None else begun - in_flight[rank]
        first = min((one.microbatch or 0 for one in row if one.op in _BACKWARDS), default=known)
        before = []
        for at in range(begun):
            before += [Action(stage, op, at) for op in (Op.FORWARD, back) if op is not back or at < first]
        done = {one.microbatch for one in before if one.op is back}
        after = [Action(stage, back, at) for at in range(count) if at not in done and (back, at) not in there]
        after.append(Action(stage, Op.UPDATE, count - 1))
        if (Op.UPDATE, count - 1) in there:
            after.pop()
        rows.append([*before, *row, *after])
        own.append([False] * len(before) + [True] * len(row) + [False] * len(after))
    return Program.of(rows, program.name), own
