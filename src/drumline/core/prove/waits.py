"""Checks of the WAITs for sends and gradient exchanges, which programs for torch 2.15 spell out.

    0SEND_F0 ... 0B0,0WAIT_SEND_F0        each WAIT behind what it waits for, on the same rank, once
    0REDUCE_GRAD ... 0WAIT_REDUCE_GRAD

A program that has one of them has all: PyTorch refuses a lowered file that leaves a send or an exchange without.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core import rules
from drumline.core.action import AWAITED, SEND_OPS, WAIT_OPS, Action, Op
from drumline.core.prove.index import Index, Place
from drumline.core.prove.violation import Violation

_WAITED = SEND_OPS | {Op.REDUCE_GRAD}
_WAIT_FOR = {awaited: wait for wait, awaited in AWAITED.items()}


def check(index: Index) -> Iterator[Violation]:
    """Yield every WAIT without its send or exchange, and every send or exchange without its WAIT."""
    if not index.ops & WAIT_OPS:
        return
    for rank, row in enumerate(index.program.rows):
        begun: dict[Action, int] = {}
        waited: dict[Action, int] = {}
        for at, action in enumerate(row):
            if action.op in _WAITED:
                if action in begun and action.op is Op.REDUCE_GRAD:
                    yield Violation(rank, at, action, f"begins again before {wait_for(action)}")
                begun.setdefault(action, at)
                waited.pop(action, None)
            elif action.op in WAIT_OPS:
                awaited = action._replace(op=AWAITED[action.op])
                if awaited in waited:
                    yield Violation(rank, at, action, f"waits again; it did at position {waited[awaited]}")
                elif awaited not in begun:
                    yield Violation(rank, at, action, f"waits for {awaited}, which does not stand before it")
                else:
                    del begun[awaited]
                    waited[awaited] = at
        for action, at in begun.items():
            yield Violation(rank, None, wait_for(action), f"is missing: {action} at position {at} is never waited for")


def wait_for(action: Action) -> Action:
    """Return the action that waits for a send or a gradient exchange.

    >>> wait_for(Action.parse("0SEND_F3"))
    0WAIT_SEND_F3
    """
    return action._replace(op=_WAIT_FOR[action.op])


def waits(index: Index) -> dict[Place, list[Place]]:
    """Return, per WAIT, what another rank must have posted before it ends: the receive, or its copy's exchange."""
    found: dict[Place, list[Place]] = {}
    if not index.ops & WAIT_OPS:
        return found
    turns: dict[tuple[int, Action], list[Place]] = {}
    for rank, row in enumerate(index.program.rows):
        for at, action in enumerate(row):
            if action.op in (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD):
                turns.setdefault((rank, action), []).append(Place(rank, at))
            elif action.op in WAIT_OPS:
                send = action._replace(op=AWAITED[action.op])
                begun = any(place.rank == rank and place.position < at for place in index.transfers.get(send, ()))
                received = index.transfers.get(rules.message_of(send).recv, ())
                if begun and received and received[0].rank != rank:
                    found[Place(rank, at)] = [received[0]]
    for (rank, action), places in turns.items():
        if action.op is not Op.WAIT_REDUCE_GRAD or action.stage >= index.placement.num_stages:
            continue
        exchange = action._replace(op=Op.REDUCE_GRAD)
        for other in index.placement.ranks_of(action.stage):
            if other != rank:
                found |= {
                    place: [theirs] for place, theirs in zip(places, turns.get((other, exchange), ()), strict=False)
                }
    return found
