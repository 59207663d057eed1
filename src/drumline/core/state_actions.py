r"""Actions on a stage's parameters and gradients, placed where they cost least.

    0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0RESHARD

A stage is gathered before its first compute and released after its last. Its gradients are exchanged right after its
last backward (B or W; I makes none), while the rank continues with its other stages.
"""

from __future__ import annotations

from drumline.core import rules
from drumline.core.action import STATE_OPS, Action, Op
from drumline.core.program import Program, once_per_program


@once_per_program
def with_state(
    program: Program, ops: frozenset[Op] = STATE_OPS, stages: frozenset[int] | None = None, *, ahead: int = 0
) -> Program:
    r"""Return the program with these state actions of every stage, or of `stages`, unless it already has them.

    A stage is gathered so many computes `ahead` of its first, so that these hide the time it takes.

    >>> with_state(Program.parse("0F0,1F0,1B0,0B0"), frozenset({Op.REDUCE_GRAD})).format()
    '0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD'
    >>> with_state(Program.parse("0F0,1F0"), frozenset({Op.UNSHARD}), ahead=1).format()
    '0UNSHARD,1UNSHARD,0F0,1F0'
    """
    rows = []
    for row in program.rows:
        said = {(action.stage, action.op) for action in row if action.op in STATE_OPS}
        computes = [(at, part) for at, action in enumerate(row) if action.is_compute for part in action.work]
        places = list(dict.fromkeys(at for at, _ in computes))
        computes = [(at, part) for at, part in computes if stages is None or part.stage in stages]
        first: dict[int, int] = {}
        for at, part in computes:
            first.setdefault(part.stage, places[max(0, places.index(at) - ahead)])
        last = {part.stage: at for at, part in computes}
        last_backward = {part.stage: at for at, part in computes if part.op in rules.RELEASES}
        completed: list[Action] = []
        for at, action in enumerate(row):
            if Op.UNSHARD in ops:
                completed += [Action(s, Op.UNSHARD) for s in first if first[s] == at and (s, Op.UNSHARD) not in said]
            completed.append(action)
            for op, ends in ((Op.REDUCE_GRAD, last_backward), (Op.RESHARD, last)):
                if op in ops:
                    completed += [Action(s, op) for s in ends if ends[s] == at and (s, op) not in said]
        rows.append(tuple(completed))
    return program.rearranged(rows)
