"""Programs for models of which only a part is trained: frozen stages cost no backward that nobody needs.

    trained     rows of 1f1b on 3 ranks, 2 microbatches      without what is not needed, stage 1 alone being trained
    no          0F0,0F1,0B0,0B1                              0F0,0F1
    yes         1F0,1F1,1B0,1B1                              1F0,1F1,1B0,1B1
    no          2F0,2B0,2F1,2B1                              2F0,2I0,2F1,2I1

Below the lowest stage that trains no gradient is needed: no backward, and no message to it. Above it a frozen stage
only hands the gradient on: its B becomes I, its W goes. The lowest one itself keeps its backward as it is: where that
is split, W needs the gradients that I makes inside the stage.

An action never starts later than before: what is left waits for fewer others, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drumline.core.action import Action, Op
from drumline.core.errors import ProgramError, counted
from drumline.core.program import Program, Row
from drumline.core.rules import Backward


def prune(program: Program, trainable: Sequence[bool]) -> Program:
    r"""Return the program without the backwards that no trainable stage needs; `trainable` says it for every stage.

    Where nothing trains only forwards are left. A program that trains nothing comes back as it is.

    >>> print(prune(Program.parse("0F0,0B0\n1F0,1B0\n2F0,2B0"), [False, True, False]))
    0F0
    1F0,1B0
    2F0,2I0
    """
    if len(trainable) != program.num_stages:
        raise ProgramError(
            f"program {program.name!r} has {counted(program.num_stages, 'stage')}",
            expected=f"one flag for each of them, not {len(trainable)}",
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
                fix="give the schedule's name or the unpruned program: what is not needed is left out by itself",
            )
    if after == before:
        return program
    lowest = after.count(Backward.NONE)
    return Program(tuple(_pruned(row, after, lowest) for row in program.rows), program.name)


def needed(trainable: Sequence[bool]) -> tuple[Backward, ...]:
    """Return what each stage has to do of its backward.

    >>> [str(one) for one in needed([False, True, False])]
    ['none', 'whole', 'input']
    """
    lowest = list(trainable).index(True) if any(trainable) else len(trainable)
    above = (Backward.WHOLE if trained else Backward.INPUT for trained in trainable[lowest:])
    return (Backward.NONE,) * lowest + tuple(above)


def _pruned(row: Row, kinds: Sequence[Backward], lowest: int) -> Row:
    """Return a row with what is left of each action; a pair that loses its whole backward is taken apart."""
    left: list[Action] = []
    for action in row:
        if _goes(action, kinds, lowest):
            continue
        if action.parts and all(_left(part, kinds) == part for part in action.parts):
            left.append(action)
        elif action.is_compute:
            # The forward first, as in the pair: so it counts as held before the other lets go.
            parts = sorted(action.work, key=lambda part: part.op is not Op.FORWARD)
            left += [one for part in parts if (one := _left(part, kinds)) is not None]
        else:
            left.append(action)
    return tuple(left)


def _left(part: Action, kinds: Sequence[Backward]) -> Action | None:
    """Return what is left of a plain compute action, or None."""
    kind = kinds[part.stage]
    if part.op is Op.FORWARD or kind is Backward.WHOLE:
        return part
    if kind is Backward.NONE or part.op is Op.BACKWARD_WEIGHT:
        return None
    return part._replace(op=Op.BACKWARD_INPUT)


def _goes(action: Action, kinds: Sequence[Backward], lowest: int) -> bool:
    """Whether an action that is not compute has lost its reason: a gradient nobody takes, an exchange of none."""
    match action.op:
        case Op.REDUCE_GRAD | Op.WAIT_REDUCE_GRAD | Op.UPDATE:
            return kinds[action.stage] is not Backward.WHOLE
        case Op.SEND_B | Op.WAIT_SEND_B:
            return action.stage <= lowest
        case Op.RECV_B:
            return action.stage < lowest
    return False


def untrained(program: Program) -> Iterator[str]:
    r"""Yield, in words, what a program leaves out because stages are frozen.

    >>> list(untrained(Program.parse("0F0\n1F0,1B0\n2F0,2I0")))
    ['no backward in stage 0', 'no weight gradients in stage 2']
    """
    if not program.has_backward:
        return
    for kind, what in ((Backward.NONE, "no backward"), (Backward.INPUT, "no weight gradients")):
        stages = [stage for stage, one in enumerate(program.backwards) if one is kind]
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
