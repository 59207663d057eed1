"""Checks on programs that contain sends and receives: each message once, in time, and in one order per edge.

Programs for torch 2.15 also contain WAITs for sends and gradient exchanges:

    0SEND_F0 ... 0B0,0WAIT_SEND_F0        each WAIT once, after what it waits for, on the same rank
    0REDUCE_GRAD ... 0WAIT_REDUCE_GRAD

A program with any WAIT must have all of them: PyTorch rejects a lowered file with a send or exchange that has no WAIT.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from drumline.core import rules
from drumline.core.action import AWAITED, SEND_OPS, WAIT_OPS, Action, Op
from drumline.core.prove.index import Index, RowPosition
from drumline.core.prove.violation import Violation


def sent_at(index: Index, producer: Action, place: RowPosition) -> RowPosition:
    """Return where `producer`'s output leaves its rank: at its send, or at `producer` if the program has no sends."""
    message = rules.message(producer, index.program.num_stages)
    sends = index.transfers.get(message.send, []) if message else []
    return next((send for send in sends if send.rank == place.rank and send.at >= place.at), place)


def check(index: Index) -> Iterator[Violation]:
    """Yield every violation of the message rules; none for a compute-only program."""
    if not index.program.has_communication:
        return
    yield from _stray(index)
    for action, inputs in index.inputs.items():
        place = index.places[action][0]
        for needed in inputs:
            # A stage that works on two ranks violates the placement; no message would fix that.
            if needed[1].rank != place.rank and needed[0].stage != action.stage:
                yield from _message(index, needed, (action, place))
    yield from _orders(index)


def _stray(index: Index) -> Iterator[Violation]:
    """Find sends and receives that carry nothing: duplicates, or without work on two different ranks."""
    for action, (place, *again) in index.transfers.items():
        for other in again:
            yield Violation(*other, action, f"is posted again; it was first posted at position {place.at}")
        producer, taken = index.first(rules.producers(action)), index.first(rules.consumers(action))
        if producer is None:
            yield Violation(*place, action, f"carries the output of {rules.producers(action)[0]}, which never runs")
        elif taken is None:
            yield Violation(*place, action, "carries data that no action uses")
        elif producer[1].rank == taken[1].rank:
            reason = f"is not needed: {producer[0]} and {taken[0]} are both on rank {place.rank}"
            yield Violation(*place, action, reason)
        else:
            there, belongs = producer if action.op in SEND_OPS else taken
            if place.rank != belongs.rank:
                yield Violation(*place, action, f"is on the wrong rank: {there} is on rank {belongs.rank}")


def _message(
    index: Index, source: tuple[Action, RowPosition], taken: tuple[Action, RowPosition]
) -> Iterator[Violation]:
    message = rules.message(source[0], index.program.num_stages)
    assert message is not None
    for transfer, (action, place), early in ((message.send, source, True), (message.recv, taken, False)):
        posted = index.transfers.get(transfer)
        if posted is None:
            reason = f"is missing: {taken[0]} on rank {taken[1].rank} needs {source[0]} of rank {source[1].rank}"
            yield Violation(place.rank, None, transfer, reason)
        elif posted[0].rank == place.rank and (posted[0].at < place.at) == early:
            yield Violation(*posted[0], transfer, f"is posted {'before' if early else 'after'} {action}")


def _orders(index: Index) -> Iterator[Violation]:
    """Compare, edge by edge, the order of sends with the order of their receives."""
    edges: dict[tuple[int, int], tuple[list[tuple[int, Action]], list[tuple[int, Action]]]] = {}
    for action, (sent, *_) in index.transfers.items():
        recv = rules.message_of(action).recv
        if action.op in SEND_OPS and recv in index.transfers:
            received = index.transfers[recv][0]
            sends, receives = edges.setdefault((sent.rank, received.rank), ([], []))
            sends.append((sent.at, recv))
            receives.append((received.at, recv))
    for (source, target), orders in edges.items():
        pairs = zip(*(sorted(order, key=itemgetter(0)) for order in orders), strict=True)
        differing = next(((sent, *posted) for (_, sent), posted in pairs if sent != posted[1]), None)
        if differing is not None:
            expected, at, posted = differing
            reason = f"is received, but rank {source} sends {rules.message_of(expected).send} first: the orders differ"
            yield Violation(target, at, posted, reason)


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
                    yield Violation(rank, at, action, f"waits again; it first waited at position {waited[awaited]}")
                elif awaited not in begun:
                    yield Violation(rank, at, action, f"waits for {awaited}, which does not come before it")
                else:
                    del begun[awaited]
                    waited[awaited] = at
        for action, at in begun.items():
            yield Violation(rank, None, wait_for(action), f"is missing: nothing waits for {action} at position {at}")


def wait_for(action: Action) -> Action:
    """Return the action that waits for a send or a gradient exchange.

    >>> wait_for(Action.parse("0SEND_F3"))
    0WAIT_SEND_F3
    """
    return action._replace(op=_WAIT_FOR[action.op])


def waits(index: Index) -> dict[RowPosition, list[RowPosition]]:
    """Return, per WAIT, what another rank must post before it can end: the receive, or the other copy's exchange."""
    positions: dict[RowPosition, list[RowPosition]] = {}
    if not index.ops & WAIT_OPS:
        return positions
    turns: dict[tuple[int, Action], list[RowPosition]] = {}
    for rank, row in enumerate(index.program.rows):
        for at, action in enumerate(row):
            if action.op in (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD):
                turns.setdefault((rank, action), []).append(RowPosition(rank, at))
            elif action.op in WAIT_OPS:
                send = action._replace(op=AWAITED[action.op])
                begun = any(place.rank == rank and place.at < at for place in index.transfers.get(send, ()))
                received = index.transfers.get(rules.message_of(send).recv, ())
                if begun and received and received[0].rank != rank:
                    positions[RowPosition(rank, at)] = [received[0]]
    for (rank, action), places in turns.items():
        if action.op is not Op.WAIT_REDUCE_GRAD or action.stage >= index.placement.num_stages:
            continue
        exchange = action._replace(op=Op.REDUCE_GRAD)
        for other in index.placement.ranks_of(action.stage):
            if other != rank:
                positions |= {
                    place: [theirs] for place, theirs in zip(places, turns.get((other, exchange), ()), strict=False)
                }
    return positions
