"""The dependency rules: which action needs which. Validator, simulator, search, lowering and executor all read them.

    F of a stage needs F of the stage before it.          0F3 ──► 1F3 ──► 2F3
    B and I need F of their own stage, and B or I          │       │       │
    of the stage after it. W needs its own I.             0B3 ◄── 1B3 ◄── 2B3

What a rank needs from another travels as a message: activations after F, gradients after B or I. A stage that
trains runs F and B, or F, I and W, once per microbatch; a frozen stage runs less. `Columns.backwards` reads from the
rows how much of its backward each stage runs:

    stage 3   F I W    (or F B) it trains
    stage 2   F I      it does not train, but must pass the gradient on: only the half that makes it
    stage 1   F I W    the lowest stage that trains; nothing needs the gradient of its input
    stage 0   F        nothing here or below trains, so no gradient ever arrives

All microbatches of a stage do the same. A stage that matches none of these counts as one that trains, and the validator
reports its missing work.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from drumline.core.action import Action, Op


class Need(NamedTuple):
    """An input: any one of `ops` at the stage `stage_offset` away, same microbatch."""

    stage_offset: int
    ops: tuple[Op, ...]


_OWN_FORWARD = Need(0, (Op.FORWARD,))
_GRADIENT = Need(+1, (Op.BACKWARD, Op.BACKWARD_INPUT))

NEEDS: dict[Op, tuple[Need, ...]] = {
    Op.FORWARD: (Need(-1, (Op.FORWARD,)),),
    Op.BACKWARD: (_OWN_FORWARD, _GRADIENT),
    Op.BACKWARD_INPUT: (_OWN_FORWARD, _GRADIENT),
    Op.BACKWARD_WEIGHT: (Need(0, (Op.BACKWARD_INPUT,)),),
}


class Backward(StrEnum):
    """How much of its backward a stage runs."""

    WHOLE = "whole"  # B, or I and W
    INPUT = "input"  # I alone
    NONE = "none"  # F alone


# What a stage runs per microbatch, by its kind of backward: all actions of any one of these ways, each once.
WAYS: dict[Backward, tuple[frozenset[Op], ...]] = {
    Backward.WHOLE: (
        frozenset({Op.FORWARD, Op.BACKWARD}),
        frozenset({Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}),
    ),
    Backward.INPUT: (frozenset({Op.FORWARD, Op.BACKWARD_INPUT}),),
    Backward.NONE: (frozenset({Op.FORWARD}),),
}

# The ops that release a pair from memory, and the halves of an overlapped pair.
RELEASES = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})
OVERLAPPED = (Op.FORWARD, Op.BACKWARD)


def message_offsets(needs: dict[Op, tuple[Need, ...]]) -> dict[Op, int]:
    """Return, per op, how many stages away its output is needed, if not in its own stage.

    >>> message_offsets(NEEDS)[Op.FORWARD]
    1
    """
    return {
        op: -need.stage_offset for inputs in needs.values() for need in inputs for op in need.ops if need.stage_offset
    }


MESSAGE_TO = message_offsets(NEEDS)


def needs(action: Action, num_stages: int) -> Iterator[tuple[Action, ...]]:
    """Yield the inputs of a plain action; each is a tuple of alternatives, one of which must have run.

    >>> list(needs(Action.parse("1B0"), num_stages=3))
    [(1F0,), (2B0, 2I0)]
    >>> list(needs(Action.parse("0F0"), num_stages=3))
    []
    """
    for need in NEEDS.get(action.op, ()):
        stage = action.stage + need.stage_offset
        if 0 <= stage < num_stages:
            yield tuple(Action(stage, op, action.microbatch) for op in need.ops)


class Message(NamedTuple):
    """What travels after a plain action, with its send and receive."""

    send: Action
    recv: Action


# Maps each send to its receive, and to the ops that can make what they carry.
_CARRIED = {(Op.SEND_F, Op.RECV_F): (Op.FORWARD,), (Op.SEND_B, Op.RECV_B): (Op.BACKWARD, Op.BACKWARD_INPUT)}
SPELLED: dict[Op, tuple[Op, Op]] = {op: pair for pair, ops in _CARRIED.items() for op in ops}
_MAKERS: dict[Op, tuple[Op, ...]] = {transfer: ops for pair, ops in _CARRIED.items() for transfer in pair}


def message(action: Action, num_stages: int) -> Message | None:
    """Return what `action` passes to a neighbouring stage, or None; it travels only if that stage is on another rank.

    >>> message(Action.parse("1F0"), num_stages=3)
    Message(send=1SEND_F0, recv=2RECV_F0)
    >>> message(Action.parse("2F0"), num_stages=3) is None
    True
    """
    offset = MESSAGE_TO.get(action.op)
    if offset is None or not 0 <= action.stage + offset < num_stages:
        return None
    send, recv = SPELLED[action.op]
    return Message(
        Action(action.stage, send, action.microbatch), Action(action.stage + offset, recv, action.microbatch)
    )


def message_of(transfer: Action) -> Message:
    """Return the message that a send or a receive belongs to.

    >>> message_of(Action.parse("2RECV_F0")).send
    1SEND_F0
    """
    maker = _MAKERS[transfer.op][0]
    offset, (send, recv) = MESSAGE_TO[maker], SPELLED[maker]
    stage = transfer.stage if transfer.op is send else transfer.stage - offset
    return Message(Action(stage, send, transfer.microbatch), Action(stage + offset, recv, transfer.microbatch))


def producers(transfer: Action) -> tuple[Action, ...]:
    """Return the actions that can make what `transfer` carries.

    >>> producers(Action.parse("2RECV_B0"))
    (3B0, 3I0)
    """
    action = message_of(transfer).send
    return tuple(Action(action.stage, op, action.microbatch) for op in _MAKERS[transfer.op])


def consumers(transfer: Action) -> tuple[Action, ...]:
    """Return the actions that can use what `transfer` carries.

    >>> consumers(Action.parse("2RECV_B0"))
    (2B0, 2I0)
    """
    taken = message_of(transfer).recv
    needed = Need(-MESSAGE_TO[_MAKERS[transfer.op][0]], _MAKERS[transfer.op])
    return tuple(Action(taken.stage, op, taken.microbatch) for op, inputs in NEEDS.items() if needed in inputs)


def leaves_late(transfer: Action) -> bool:
    """Whether a message is the second of the two that an overlapped pair makes: activations leave before gradients.

    >>> leaves_late(Action.parse("2SEND_F0")), leaves_late(Action.parse("1RECV_B0"))
    (False, True)
    """
    return Op.FORWARD not in _MAKERS[transfer.op]
