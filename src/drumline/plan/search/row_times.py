"""When every action of a row ends: the simulator's arithmetic on flat lists, without compiling a program first.

Compiling takes longer than timing, and a search looks at each program once. The same sweep as in the simulator runs
every row as far as its needs allow; `ready` is when an action's output can be used.

    end = max(end of the previous one, ready of its need) + seconds        ready = end + latency

A link of finite bandwidth carries one message at a time, in the order of its source's row.

The kernel does the same, with the same bits (rows.c).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drumline.core.graph import Floats, Messages
from drumline.core.kernel.library import Kernel, kernel, pointer, slower
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.simulate import simulate
from drumline.plan.search.bounds.instance import B, Instance, Rows
from drumline.plan.search.packed import PackedInstance

_UNKNOWN = math.inf

Ends = list[tuple[float, float]]  # every rank's first start and last end
Times = tuple[Ends, list[float]]
Clock = Callable[[Rows, Sequence[float]], Times | None]


def clock(instance: Instance, *, until_sent: bool = False) -> Clock:
    """Return the function that times rows: every rank's start and end, or None if ranks wait for each other.

    Its second argument says when each rank may begin. If sends occupy their rank, a rank ends with its last action, or
    with its last send if `until_sent`.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> value = Instance(Costs(), Placement.linear(2), num_microbatches=1)
    >>> clock(value)(value.rows_of(value.plain), [0.0, 0.0])[0]
    [(0.0, 5.0), (1.0, 4.0)]
    """
    if instance.messages is Messages.BLOCKING:
        return _simulated(instance, until_sent)
    library = kernel()
    if library is not None:
        return _compiled(library, instance)
    return _with_links(instance) if instance.messages is Messages.LINKS else _with_latency(instance)


def _compiled(library: Kernel, instance: Instance) -> Clock:
    packed = PackedInstance(instance)

    def timed(rows: Rows, begin: Sequence[float]) -> Times | None:
        flat, lengths = packed.flat(rows)
        ready, begins = np.empty(instance.num_actions + 1), np.array(begin, dtype=np.float64)
        first, last = np.empty((2, len(rows)))
        arrays = flat, lengths, begins, ready, first, last
        done = library.rows(packed.address, *map(pointer, arrays))
        if done == Kernel.OUT_OF_MEMORY:
            raise MemoryError(f"no memory to time {instance.num_actions} actions")
        return (list(zip(first.tolist(), last.tolist(), strict=True)), [*ready[1:].tolist(), 0.0]) if done else None

    return timed


def _with_latency(instance: Instance) -> Clock:
    size = instance.num_actions
    facts = [
        (number - 2 if number % 4 == B else number, need, seconds, latency)
        for number, (need, seconds, latency) in enumerate(
            zip(instance.need, instance.seconds, instance.latency, strict=True)
        )
    ]
    fact = facts.__getitem__

    def timed(rows: Rows, begin: Sequence[float]) -> Times | None:
        slower(size)
        ready = [_UNKNOWN] * size + [0.0]
        last = list(begin)
        halted: list[Any] = []
        for rank, row in enumerate(rows):
            nodes = map(fact, row)
            halted.append((rank, nodes, next(nodes)))
        while halted:
            again, moved = [], False
            for entry in halted:
                rank, nodes, (slot, need, seconds, latency) = entry
                arrived, time = ready[need], last[rank]
                if arrived == _UNKNOWN:
                    again.append(entry)
                    continue
                moved = True
                time = (arrived if arrived > time else time) + seconds
                ready[slot] = time + latency
                for node in nodes:
                    slot, need, seconds, latency = node
                    arrived = ready[need]
                    if arrived > time:
                        if arrived == _UNKNOWN:
                            again.append((rank, nodes, node))
                            break
                        time = arrived
                    time += seconds
                    ready[slot] = time + latency
                last[rank] = time
            if not moved:
                return None
            halted = again[::-1]
        starts = (max(early, ready[instance.need[row[0]]]) for row, early in zip(rows, begin, strict=True))
        return list(zip(starts, last, strict=True)), ready

    return timed


def _with_links(instance: Instance) -> Clock:
    size, num_links = instance.num_actions, instance.num_ranks**2
    facts = [
        (number - 2 if number % 4 == B else number, need, seconds, latency - moving, link, moving)
        for number, (need, seconds, latency, link, moving) in enumerate(
            zip(instance.need, instance.seconds, instance.latency, instance.link, instance.moving, strict=True)
        )
    ]

    def timed(rows: Rows, begin: Sequence[float]) -> Times | None:
        slower(size)
        ready = [_UNKNOWN] * size + [0.0]
        free = [0.0] * num_links
        at, time, first = [0] * len(rows), list(begin), list(begin)
        left = list(range(len(rows)))
        while left:
            moved, again = False, []
            for rank in left:
                row, here, now = rows[rank], at[rank], time[rank]
                end = len(row)
                while here < end:
                    slot, need, seconds, latency, link, moving = facts[row[here]]
                    arrived = ready[need]
                    if arrived == _UNKNOWN:
                        break
                    now = max(now, arrived)
                    if here == 0:
                        first[rank] = now
                    now += seconds
                    sent = now
                    if link >= 0:
                        sent = free[link] = max(now, free[link]) + moving
                    ready[slot] = sent + latency
                    here += 1
                moved = moved or here > at[rank]
                at[rank], time[rank] = here, now
                if here < end:
                    again.append(rank)
            if not moved:
                return None
            left = again[::-1]
        return list(zip(first, time, strict=True)), ready

    return timed


def _simulated(instance: Instance, until_sent: bool) -> Clock:
    """Use the simulator itself: if messages occupy ranks, it matters when they are posted."""

    def timed(rows: Rows, begin: Sequence[float]) -> Times | None:
        try:
            timeline = simulate(instance.program(rows), instance.costs)
        except InvalidProgram:
            return None
        tracks = timeline.tracks
        lasts = [track.ends[-1] for track in tracks]
        if until_sent:
            moved = [max((span.end for span in spans), default=0.0) for spans in timeline.occupied]
            lasts = list(map(max, lasts, moved))
        ready = [0.0] * (instance.num_actions + 1)
        for row, track in zip(rows, tracks, strict=True):
            for number, end in zip(row, track.ends, strict=True):
                ready[number - 2 if number % 4 == B else number] = end + instance.latency[number]
        later = max(begin)
        return [(track.starts[0] + later, last + later) for track, last in zip(tracks, lasts, strict=True)], ready

    return timed


def clock_many(instance: Instance, factors: Floats) -> Callable[[Rows, Floats], tuple[Floats, Floats]]:
    """Return the function that times many samples at once: `factors` (actions, samples) multiply the seconds.

    It takes rows that do not wait for each other, and when every rank may begin, (ranks, samples). It returns every
    rank's first start and last end in the same shape. Links count as pure latency.
    """
    seconds = np.array(instance.seconds)[:, None] * factors
    need, latency = instance.need, instance.latency

    def timed(rows: Rows, begin: Floats) -> tuple[Floats, Floats]:
        ready: list[Floats | None] = [None] * instance.num_actions
        at, time = [0] * len(rows), [begin[rank] for rank in range(len(rows))]
        first = begin.copy()
        left = [rank for rank, row in enumerate(rows) if row]
        while left:
            for rank in left:
                row, here, now = rows[rank], at[rank], time[rank]
                while here < len(row):
                    number = row[here]
                    if need[number] >= 0:
                        arrived = ready[need[number]]
                        if arrived is None:
                            break
                        now = np.maximum(now, arrived)
                    if here == 0:
                        first[rank] = now
                    now = now + seconds[number]
                    ready[number - 2 if number % 4 == B else number] = now + latency[number] if latency[number] else now
                    here += 1
                at[rank], time[rank] = here, now
            left = [rank for rank in reversed(left) if at[rank] < len(rows[rank])]
        return first, np.stack(time)

    return timed
