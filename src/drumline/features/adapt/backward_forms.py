r"""The two forms of a program's backwards, whole and in halves, and the costs of both: a step runs by one of them.

    zb-h1          0F0,0F1,0I0,0W0,0I1,0W1      measured: F that keeps a tape, I, W
    whole          0F0,0F1,0B0,0B1              measured: F, B

Halves take longer than the whole: a forward keeps a tape for them, and some modules go through their graph twice. Only
with both measured is it known whether W fills more idle time than it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from drumline.adapt.repair import is_split
from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.program import Program, Row
from drumline.core.prove.whole import join


def other_form(program: Program) -> Program:
    r"""Return the same order with whole backwards instead of halves, or with W right after I instead of B.

    >>> print(other_form(Program.parse("0F0,0F1,0I0,0I1,0W0,0W1")))
    0F0,0F1,0B0,0B1
    >>> print(other_form(Program.parse("0F0,0B0")))
    0F0,0I0,0W0
    """
    if is_split(program):
        return replace(join(program, [True] * program.num_stages), name=f"{program.name} with whole backwards")
    return program.rearranged(map(_halves, program.rows), f"{program.name} with split backwards")


def _halves(row: Row) -> Iterator[Action]:
    for action in row:
        if action.op is Op.BACKWARD and not action.parts:
            yield action._replace(op=Op.BACKWARD_INPUT)
            yield action._replace(op=Op.BACKWARD_WEIGHT)
        else:
            yield action


def joint_costs(halves: Costs, whole: Costs, num_stages: int) -> Costs:
    """Return the costs of both forms, as a search needs them: what a tape adds to a forward counts with I.

    >>> halves = Costs(forward=3.0, backward_input=2.0, backward_weight=4.0)
    >>> both = joint_costs(halves, Costs(forward=2.0, backward_input=5.0, backward_weight=0.0), 1)
    >>> both.forward, both.backward, both.backward_input, both.backward_weight
    ([2.0], [5.0], [3.0], [4.0])
    """
    taped, forward = halves.per_stage("forward", num_stages), whole.per_stage("forward", num_stages)
    by_input, backward = halves.per_stage("backward_input", num_stages), whole.per_stage("backward_input", num_stages)
    return replace(
        whole,
        forward=list(forward),
        backward=list(backward),
        backward_input=[i + max(long - bare, 0.0) for i, long, bare in zip(by_input, taped, forward, strict=True)],
        backward_weight=list(halves.per_stage("backward_weight", num_stages)),
    )
