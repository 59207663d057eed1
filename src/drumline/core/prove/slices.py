"""The rule of slices: on every stage, those of a microbatch go forward in order and backward in reverse.

    0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0B0.0

A slice attends to the keys and values of those before it, so they must be there. Their gradients are complete once all
later slices have gone back. Keys and values do not travel, so all slices of a microbatch are on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from drumline.core.action import Op
from drumline.core.graph import CODE
from drumline.core.program import Program, once_per_program
from drumline.core.prove.index import Index
from drumline.core.prove.violation import Violation

FORWARDS, BACKWARDS = (Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_INPUT)  # I brings gradients of keys and values


@once_per_program
def in_order(program: Program) -> bool:
    """Whether slices are in order in a program that is legal otherwise.

    Where two copies of a stage run slices of one microbatch, those of some stage are on ranks in the wrong order.

    >>> in_order(Program.parse("0F0.0,0F0.1,0B0.1,0B0.0")), in_order(Program.parse("0F0.0,0F0.1,0B0.0,0B0.1"))
    (True, False)
    """
    if program.num_slices == 1:
        return True
    columns = program.columns
    shape = program.num_stages, program.num_microbatches, program.num_slices
    for ops, step in ((FORWARDS, 1), (BACKWARDS, -1)):
        chosen = np.isin(columns.code, [CODE[op] for op in ops])
        stage, unit = columns.stage[chosen], columns.microbatch[chosen]
        place = np.arange(np.prod(shape))[::step].copy()  # in order, for a stage without backwards
        place[stage.astype(np.int64) * program.num_units + unit] = columns.cell[chosen]
        if (np.diff(place.reshape(shape)) * step <= 0).any():
            return False
    return True


def out_of_order(index: Index) -> Iterator[Violation]:
    r"""Yield every action that runs before a slice that it needs, or on another rank.

    >>> program = Program.parse("0F0.1,0F0.0,0B0.1,0B0.0")
    >>> [str(violation) for violation in out_of_order(Index(program, program.placement))]
    ['rank 0, position 0: 0F0.1 runs before 0F0.0: slices of a microbatch go forward in order']
    """
    count, places = index.program.num_slices, index.places
    for action, (place, *_) in places.items() if count > 1 else ():
        back = action.op in BACKWARDS
        if action.microbatch is None or not (back or action.op in FORWARDS):
            continue
        number = action.microbatch % count + (1 if back else -1)
        ops = BACKWARDS if back else FORWARDS
        unit = index.numbers[action.microbatch + (1 if back else -1)] if 0 <= number < count else None
        for needed in (action._replace(op=op, microbatch=unit) for op in ops if unit is not None):
            other = places.get(needed, [None])[0]
            if other is not None and other.rank != place.rank:
                reason = f"is on another rank than {needed}: slices of a microbatch share keys and values"
                yield Violation(*place, action, reason)
            elif other is not None and other.at >= place.at:
                how = "in one overlapped pair with" if other.at == place.at else "before"
                way = "backward in reverse" if back else "forward in order"
                yield Violation(*place, action, f"runs {how} {needed}: slices of a microbatch go {way}")
