"""Programs for stages that train few of their weights, as adapters do: their backwards run whole.

    trained     rows of zb-h1 on 2 ranks, 2 microbatches     joined, if stage 0 trains adapters alone
    adapters    0F0,0F1,0I0,0W0,0I1,0W1                      0F0,0F1,0B0,0B1
    all         1F0,1I0,1F1,1I1,1W0,1W1                      1F0,1I0,1F1,1I1,1W0,1W1

A split backward pays for itself by W that fill idle time. If little trains, W is too short to fill any, but splitting
costs the same: every forward keeps records for W, and every W is a call. So I becomes B, and W disappears.

The joined program is legal if the split one was: only the end of its own stage waits for W. B takes the place of I, so
it needs the same. B frees what W would have held until later. What B computes is what I and W computed, and sums of
gradients follow the order of I, which schedules keep for W.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from drumline.core.action import Action, Op
from drumline.core.program import Program, Row
from drumline.core.rules import Backward

# Up to this share of trained weights, splitting costs more than W could fill. If F = I, a W of 5% of F shortens a step
# of zb-h1 on 4 ranks with 8 microbatches by 1.3%. Splitting the backward of adapters lengthens the step by more.
LIGHT = 0.05


def is_light(num_trained: float, num_weights: float) -> bool:
    """Whether so few weights train that their gradients are not worth their own action.

    >>> is_light(4, 100), is_light(10, 100), is_light(0, 100)
    (True, False, False)
    """
    return 0 < num_trained <= LIGHT * num_weights


def join(program: Program, light: Sequence[bool]) -> Program:
    r"""Return the program with whole backwards in the stages whose flag is set.

    >>> print(join(Program.parse("0F0,0I0,0W0\n1F0,1I0,1W0"), [True, False]))
    0F0,0B0
    1F0,1I0,1W0
    """
    split = {stage for stage, kind in enumerate(program.backwards) if light[stage] and kind is Backward.WHOLE}
    if not split or Op.BACKWARD_WEIGHT not in program.columns.ops:
        return program
    return program.rearranged(_joined(row, split) for row in program.rows)


def _joined(row: Row, stages: Collection[int]) -> Iterator[Action]:
    for action in row:
        if action.parts or action.stage not in stages:
            yield action
        elif action.op is Op.BACKWARD_INPUT:
            yield action._replace(op=Op.BACKWARD)
        elif action.op is not Op.BACKWARD_WEIGHT:
            yield action
