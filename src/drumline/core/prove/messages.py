"""Checks of a program that spells its sends and receives out: each message once, in time, and in one order per edge.

Programs for torch 2.15 also spell out WAITs for sends and gradient exchanges:

    0SEND_F0 ... 0B0,0WAIT_SEND_F0        each WAIT behind what it waits for, on the same rank, once
    0REDUCE_GRAD ... 0WAIT_REDUCE_GRAD

A program that has one of them has all: PyTorch refuses a lowered file that leaves a send or an exchange without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from drumline.core import rules
from drumline.core.action import AWAITED, SEND_OPS, WAIT_OPS, Action, Op
from drumline.core.prove.index import Index, Place
from drumline.core.prove.violation import Violation


def sent_at(index: Index, producer: Action, place: Place) -> Place:
    """Return where `producer`'s output leaves its rank: at its send, or at itself where sends are not spelled out."""
    message = rules.message(producer, index.program.num_stages)
    sends = index.transfers.get(message.send, []) if message else []
    return next((send for send in sends if send.rank == place.rank and send.position >= place.position), place)


def check(index: Index) -> Iterator[Violation]:
    """Yield every violation of the messages; nothing for a compute-only program."""
    if not index.program.has_communication:
        return
    yield from _stray(index)
    for action, inputs in index.inputs.items():
        place = index.places[action][0]
        for needed in inputs:
            # A stage's own work on two ranks is a matter of placement, and no message would mend it.
            if needed[1].rank != place.rank and needed[0].stage != action.stage:
                yield from _message(index, needed, (action, place))
    yield from _orders(index)


def _stray(index: Index) -> Iterator[Violation]:
    """Find transfers that carry nothing: doubled, or without work at both ends on two ranks."""
    for action, places in index.transfers.items():
        for place in places[1:]:
            reason = f"is posted again; it was at position {places[0].position}"
            yield Violation(place.rank, place.position, action, reason)
        made = index.first(rules.producers(action))
        taken = index.first(rules.consumers(action))
        place = places[0]
        if made is None:
            reason = f"carries what {rules.producers(action)[0]} never makes"
            yield Violation(place.rank, place.position, action, reason)
        elif taken is None:
            yield Violation(place.rank, place.position, action, "carries what no action takes up")
        elif made[1].rank == taken[1].rank:
            reason = f"is needless: {made[0]} and {taken[0]} are both on rank {place.rank}"
            yield Violation(place.rank, place.position, action, reason)
        else:
            sends = action.op in SEND_OPS
            belongs = made[1].rank if sends else taken[1].rank
            if place.rank != belongs:
                reason = f"is on the wrong rank: {(made if sends else taken)[0]} is on rank {belongs}"
                yield Violation(place.rank, place.position, action, reason)


def _message(index: Index, made: tuple[Action, Place], taken: tuple[Action, Place]) -> Iterator[Violation]:
    message = rules.message(made[0], index.program.num_stages)
    assert message is not None
    for transfer, (action, place), early in ((message.send, made, True), (message.recv, taken, False)):
        posted = index.transfers.get(transfer)
        if posted is None:
            reason = f"is missing: {taken[0]} on rank {taken[1].rank} needs {made[0]} of rank {made[1].rank}"
            yield Violation(place.rank, None, transfer, reason)
        elif posted[0].rank == place.rank and (posted[0].position < place.position) == early:
            reason = f"is posted {'before' if early else 'after'} {action}"
            yield Violation(place.rank, posted[0].position, transfer, reason)


def _orders(index: Index) -> Iterator[Violation]:
    """Compare, edge by edge, the order of sends with the order of their receives."""
    sends: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for action, places in index.transfers.items():
        if action.op not in SEND_OPS:
            continue
        recv = rules.message_of(action).recv
        if recv in index.transfers:
            sent, received = places[0], index.transfers[recv][0]
            sends[sent.rank, received.rank].append((sent.position, recv))
            receives[sent.rank, received.rank].append((received.position, recv))
    for edge, listed in sends.items():
        pairs = zip(sorted(listed, key=_first), sorted(receives[edge], key=_first), strict=True)
        differing = next(((first, second) for first, second in pairs if first[1] != second[1]), None)
        if differing is not None:
            (_, expected), (at, posted) = differing
            reason = f"is received where rank {edge[0]} sends {rules.message_of(expected).send}: one edge, two orders"
            yield Violation(edge[1], at, posted, reason)


def _first(entry: tuple[int, Action]) -> int:
    return entry[0]


_WAITED = SEND_OPS | {Op.REDUCE_GRAD}
_WAIT_FOR = {awaited: wait for wait, awaited in AWAITED.items()}


def check_waits(index: Index) -> Iterator[Violation]:
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
