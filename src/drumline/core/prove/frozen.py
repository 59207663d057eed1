"""Programs for partly frozen models: frozen stages skip the backwards that no trainable stage needs.

    trained     rows of 1f1b on 3 ranks, 2 microbatches      pruned, if only stage 1 trains
    no          0F0,0F1,0B0,0B1                              0F0,0F1
    yes         1F0,1F1,1B0,1B1                              1F0,1F1,1B0,1B1
    no          2F0,2B0,2F1,2B1                              2F0,2I0,2F1,2I1

Below the lowest trainable stage no gradient is needed: no backward, and no gradient message. Above it, a frozen stage
only passes the gradient on: its B becomes I, and its W disappears. The lowest trainable stage keeps its backward as it
is: if it is split, W needs the gradients that I makes inside the stage.

No action starts later than before: the remaining actions wait for fewer others, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drumline.core.action import Action, Op
from drumline.core.errors import ProgramError, counted
from drumline.core.program import Program, Row
from drumline.core.rules import Backward


def prune(program: Program, trainable: Sequence[bool]) -> Program:
    r"""Return the program without the backwards that no trainable stage needs; `trainable` has one flag per stage.

    If nothing trains, only forwards remain. A program without backwards is returned unchanged.

    >>> print(prune(Program.parse("0F0,0B0\n1F0,1B0\n2F0,2B0"), [False, True, False]))
    0F0
    1F0,1B0
    2F0,2I0
    """
    if len(trainable) != program.num_stages:
        raise ProgramError(
            f"program {program.name!r} has {counted(program.num_stages, 'stage')}",
            expected=f"one trainable flag per stage, not {len(trainable)}",
        )
    if not program.has_backward:
        return program
    before, after = program.backwards, needed(trainable)
    for stage, trained in enumerate(trainable):
        if trained and before[stage] is not Backward.WHOLE:
            has = "no backward" if before[stage] is Backward.NONE else "no weight gradients"
            raise ProgramError(
                f"stage {stage} has trainable parameters, but {has} in the program {program.name!r}",
                expected="a program made for the same frozen stages",
                fix="pass the schedule's name or the unpruned program; Drumline removes unneeded backwards itself",
            )
    if after == before:
        return program
    lowest = after.count(Backward.NONE)
    return program.rearranged(_pruned(row, after, lowest) for row in program.rows)


def needed(trainable: Sequence[bool]) -> tuple[Backward, ...]:
    """Return how much of its backward each stage has to run.

    >>> [str(value) for value in needed([False, True, False])]
    ['none', 'whole', 'input']
    """
    lowest = list(trainable).index(True) if any(trainable) else len(trainable)
    above = (Backward.WHOLE if trained else Backward.INPUT for trained in trainable[lowest:])
    return (Backward.NONE,) * lowest + tuple(above)


def _pruned(row: Row, kinds: Sequence[Backward], lowest: int) -> Row:
    """Return what remains of a row; a pair that loses its whole backward is split up."""
    left: list[Action] = []
    for action in row:
        if _goes(action, kinds, lowest):
            continue
        if action.parts and all(_left(part, kinds) == part for part in action.parts):
            left.append(action)
        elif action.is_compute:
            # The forward comes first, as in the pair, so it counts as held before the other is released.
            parts = sorted(action.work, key=lambda part: part.op is not Op.FORWARD)
            left += [other for part in parts if (other := _left(part, kinds)) is not None]
        else:
            left.append(action)
    return tuple(left)


def _left(part: Action, kinds: Sequence[Backward]) -> Action | None:
    """Return what remains of a plain compute action, or None."""
    kind = kinds[part.stage]
    if part.op is Op.FORWARD or kind is Backward.WHOLE:
        return part
    if kind is Backward.NONE or part.op is Op.BACKWARD_WEIGHT:
        return None
    return part._replace(op=Op.BACKWARD_INPUT)


def _goes(action: Action, kinds: Sequence[Backward], lowest: int) -> bool:
    """Whether a non-compute action has become useless: it carries an unused gradient or exchanges nothing."""
    match action.op:
        case Op.REDUCE_GRAD | Op.WAIT_REDUCE_GRAD | Op.UPDATE:
            return kinds[action.stage] is not Backward.WHOLE
        case Op.SEND_B | Op.WAIT_SEND_B:
            return action.stage <= lowest
        case Op.RECV_B:
            return action.stage < lowest
    return False


def untrained(program: Program) -> Iterator[str]:
    r"""Yield phrases that say what a program leaves out because stages are frozen.

    >>> list(untrained(Program.parse("0F0\n1F0,1B0\n2F0,2I0")))
    ['no backward in stage 0', 'no weight gradients in stage 2']
    """
    if not program.has_backward:
        return
    for kind, what in ((Backward.NONE, "no backward"), (Backward.INPUT, "no weight gradients")):
        stages = [stage for stage, backward in enumerate(program.backwards) if backward is kind]
        if stages:
            yield f"{what} in stage{'s' if len(stages) > 1 else ''} {spans(stages)}"


def spans(stages: Sequence[int]) -> str:
    """Return stage numbers as a list of ranges.

    >>> spans([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for stage in stages:
        if runs and stage == runs[-1][-1] + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
