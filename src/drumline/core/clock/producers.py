"""Find what makes each action's input: the first half of compiling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drumline.core import rules
from drumline.core.graph import CODE, PLACE, Columns, Ints, NotCompilable, Number
from drumline.core.kernel.library import kernel
from drumline.core.rules import Backward


def _complete(kind: Backward) -> npt.NDArray[np.uint8]:
    """Return which sets of ops are complete for a stage of this kind on a microbatch; bit i is the op at index i."""
    complete = np.zeros(2 ** len(rules.NEEDS), dtype=np.uint8)
    complete[[sum(1 << PLACE[CODE[op]] for op in way) for way in rules.WAYS[kind]]] = 1
    return complete


COMPLETE = {kind: _complete(kind) for kind in Backward}


def listed_needs() -> Ints:
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
    found_needs = by_kernel(work, num_stages, num_microbatches, of_other_ranks=False)
    return _producers(work, num_stages, num_microbatches) if found_needs is None else found_needs[0]


def by_kernel(
    work: Columns, num_stages: int, num_microbatches: int, *, of_other_ranks: bool
) -> tuple[Ints, bool] | None:
    """Return the producers, and whether the actions only compute, each stage on one rank; None if the kernel cannot.

    With `of_other_ranks`, the others are -1, and rows must not have overlapped pairs.
    """
    library, count, size = kernel(), len(work.code), num_stages * num_microbatches
    columns = work.code, work.stage, work.microbatch, work.rank, work.cell
    if library is None or count < size or any(column.dtype != Number for column in columns):
        return None
    makers, flags = np.empty(count, dtype=Number), np.zeros(1, dtype=np.uint8)
    where = np.empty(len(rules.NEEDS) * size, dtype=Number)
    home = np.empty(num_stages, dtype=Number) if of_other_ranks else None
    tables = PLACE, len(rules.NEEDS), COMPLETE[Backward.WHOLE], listed_needs()
    refused = library.need(count, *columns, num_stages, num_microbatches, *tables, where, makers, home, flags)
    return None if refused else (makers, bool(flags[0]))


def _producers(work: Columns, num_stages: int, num_microbatches: int) -> Ints:
    """Return the same, also for programs with frozen stages, or say that the program breaks a rule."""
    place = PLACE[work.code]
    computing = np.flatnonzero(place >= 0)
    if len(computing) < num_stages * num_microbatches or np.any(work.microbatch[computing] < 0) or work.stage.min() < 0:
        raise NotCompilable
    size = num_stages * num_microbatches
    where = np.full(len(rules.NEEDS) * size, -1, dtype=Number)
    home = (place * size + work.stage * num_microbatches + work.microbatch)[computing]
    where[home] = computing
    if np.count_nonzero(where >= 0) != len(computing):
        raise NotCompilable
    done = (1 << np.arange(len(rules.NEEDS))) @ (where.reshape(len(rules.NEEDS), size) >= 0)
    if not COMPLETE[Backward.WHOLE][done].all():
        # Some stages are frozen; they must be frozen for all microbatches.
        for kind, ops in zip(work.backwards(num_stages), done.reshape(num_stages, num_microbatches), strict=True):
            if not COMPLETE[kind][ops].all():
                raise NotCompilable
    producer = np.full(len(work.code), -1, dtype=Number)
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
