"""Find what makes each action's input: the first half of compiling."""

from __future__ import annotations

import numpy as np

from drumline.core import rules
from drumline.core.graph import CODE, PLACE, Columns, Flags, Ints, NotCompilable
from drumline.core.kernel.library import kernel, pointer
from drumline.core.rules import Backward


def _complete(kind: Backward) -> Flags:
    """Return which sets of ops are complete for a stage of this kind on a microbatch; bit i is the op at index i."""
    complete = np.zeros(2 ** len(rules.NEEDS), dtype=bool)
    complete[[sum(1 << PLACE[CODE[op]] for op in way) for way in rules.WAYS[kind]]] = True
    return complete


_COMPLETE = {kind: _complete(kind) for kind in Backward}


def _listed_needs() -> Ints:
    """Return what every compute op needs as the kernel reads it."""
    numbers = []
    for needed in rules.NEEDS.values():
        numbers.append(len(needed))
        for need in needed:
            numbers += [need.stage_offset, len(need.ops), *(int(PLACE[CODE[op]]) for op in need.ops)]
    return np.array(numbers, dtype=np.int64)


def producers(work: Columns, num_stages: int, num_microbatches: int) -> Ints:
    """Return, per plain action, the action that makes its input from a neighbouring stage (-1: no such input).

    Also checks what the simulator relies on: nothing missing or repeated, own-stage inputs earlier in the row.
    """
    library, count, size = kernel(), len(work.code), num_stages * num_microbatches
    if library is not None and count >= size and work.stage.min(initial=0) >= 0:
        needs = _listed_needs()
        makers, where = np.empty(count, dtype=np.int64), np.empty(len(rules.NEEDS) * size, dtype=np.int32)
        columns = map(pointer, (work.code, work.stage, work.microbatch, work.rank, work.cell))
        tables = map(pointer, (_COMPLETE[Backward.WHOLE], needs, where, makers))
        counts = num_stages, num_microbatches, pointer(PLACE), len(rules.NEEDS)
        if library.producers(count, *columns, *counts, *tables) == 0:
            return makers
    return _producers(work, num_stages, num_microbatches)


def _producers(work: Columns, num_stages: int, num_microbatches: int) -> Ints:
    """Return the same, also for programs with frozen stages, or say that the program breaks a rule."""
    place = PLACE[work.code]
    computing = np.flatnonzero(place >= 0)
    if len(computing) < num_stages * num_microbatches or np.any(work.microbatch[computing] < 0) or work.stage.min() < 0:
        raise NotCompilable
    size = num_stages * num_microbatches
    where = np.full(len(rules.NEEDS) * size, -1, dtype=np.int64)
    home = (place * size + work.stage * num_microbatches + work.microbatch)[computing]
    where[home] = computing
    if np.count_nonzero(where >= 0) != len(computing):
        raise NotCompilable
    done = (1 << np.arange(len(rules.NEEDS))) @ (where.reshape(len(rules.NEEDS), size) >= 0)
    if not _COMPLETE[Backward.WHOLE][done].all():
        # Some stages are frozen; they must be frozen for all microbatches.
        for kind, ops in zip(work.backwards(num_stages), done.reshape(num_stages, num_microbatches), strict=True):
            if not _COMPLETE[kind][ops].all():
                raise NotCompilable
    producer = np.full(len(work.code), -1, dtype=np.int64)
    for op, needed in rules.NEEDS.items():
        consumers = np.flatnonzero(place == PLACE[CODE[op]])
        for need in needed if len(consumers) else ():
            stage = work.stage[consumers] + need.stage_offset
            inside = (stage >= 0) & (stage < num_stages)
            at, stage = consumers[inside], stage[inside]
            pair = stage * num_microbatches + work.microbatch[at]
            nodes = where[PLACE[CODE[need.ops[0]]] * size + pair]
            for other in need.ops[1:]:
                nodes = np.maximum(nodes, where[PLACE[CODE[other]] * size + pair])
            if np.any(nodes < 0):
                raise NotCompilable
            if need.stage_offset:
                producer[at] = nodes
            elif np.any((work.rank[nodes] != work.rank[at]) | (work.cell[nodes] >= work.cell[at])):
                raise NotCompilable
    return producer
