r"""Actions on a stage's parameters and gradients, placed where they cost least.

    0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0RESHARD

A stage is gathered before its first compute and released after its last. Its gradients are exchanged right after its
last backward (B or W; I makes none), while the rank goes on with its other stages.
"""

from __future__ import annotations

from collections.abc import Collection

from drumline.core import rules
from drumline.core.action import STATE_OPS, Action, Op
from drumline.core.program import Program, once_per_program


@once_per_program
def with_state(program: Program, ops: Collection[Op] = STATE_OPS) -> Program:
    r"""Return the program with these state actions of every stage, unless it already has them.

    >>> with_state(Program.parse("0F0,1F0,1B0,0B0"), frozenset({Op.REDUCE_GRAD})).format()
    '0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD'
    """
    rows = []
    for row in program.rows:
        said = {(action.stage, action.op) for action in row if action.op in STATE_OPS}
        computes = [(at, part) for at, action in enumerate(row) if action.is_compute for part in action.work]
        first: dict[int, int] = {}
        for at, part in computes:
            first.setdefault(part.stage, at)
        last = {part.stage: at for at, part in computes}
        last_backward = {part.stage: at for at, part in computes if part.op in rules.RELEASES}
        completed: list[Action] = []
        for at, action in enumerate(row):
            if Op.UNSHARD in ops:
                completed += [Action(s, Op.UNSHARD) for s in first if first[s] == at and (s, Op.UNSHARD) not in said]
            completed.append(action)
            for op, places in ((Op.REDUCE_GRAD, last_backward), (Op.RESHARD, last)):
                if op in ops:
                    completed += [Action(s, op) for s in places if places[s] == at and (s, op) not in said]
        rows.append(tuple(completed))
    return Program(tuple(rows), program.name)
