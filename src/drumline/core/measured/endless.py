"""Make a step of endless rows whole, so that it can be simulated: with what came before it and comes after it.

    a step of a schedule without a flush     0F2 0B1 0F3 0B2 0UPDATE1
    whole                                    0F0 0F1 0B0 | 0F2 0B1 0F3 0B2 0UPDATE1 | 0B3 0UPDATE3

What is added takes no time.
"""

from __future__ import annotations

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


def whole(program: Program) -> tuple[Program, list[list[bool]]]:
    """Return a whole program around a step, and for every row which actions are the step's own.

    >>> made, own = whole(Program.parse("0F2,0B1,0F3,0B2,0UPDATE1"))
    >>> print(made); own[0].count(True)
    0F0,0F1,0B0,0F2,0B1,0F3,0B2,0UPDATE1,0B3,0UPDATE3
    5
    """
    rows, own = [], []
    count = program.num_microbatches
    for row in program.rows:
        stage = row[0].stage
        there = {(one.op, one.microbatch) for one in row}
        back = next((one.op for other in program.rows for one in other if one.stage == stage and one.op in _BACKWARDS),
                    Op.BACKWARD)  # fmt: skip
        first = min((one.microbatch or 0 for one in row if one.op in _BACKWARDS), default=count)
        begun = min(one.microbatch or 0 for one in row if one.op is Op.FORWARD)
        before = [Action(stage, Op.FORWARD, at) for at in range(begun)]
        before += [Action(stage, back, at) for at in range(min(first, begun))]
        done = {one.microbatch for one in before if one.op is back}
        after = [Action(stage, back, at) for at in range(count) if at not in done and (back, at) not in there]
        after.append(Action(stage, Op.UPDATE, count - 1))
        if (Op.UPDATE, count - 1) in there:
            after.pop()
        rows.append([*before, *row, *after])
        own.append([False] * len(before) + [True] * len(row) + [False] * len(after))
    return Program.of(rows, program.name), own
