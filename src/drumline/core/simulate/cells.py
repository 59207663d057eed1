"""A program's rows as arrays, and who makes what each action needs: the first half of compiling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drumline.core import rules
from drumline.core.backwards import Backward
from drumline.core.program import Program
from drumline.core.simulate.columns import Columns, Flags
from drumline.core.simulate.graph import CODE, PLACE, Ints, NotCompilable, Work


@dataclass(frozen=True, slots=True)
class Cells:
    """The rows' actions as arrays: timed ones are numbered through, the others know which timed one they follow."""

    num_ranks: int
    timed_rank: Ints
    work: Work
    stage: Ints
    code: Ints
    microbatch: Ints
    rank: Ints
    follows: Ints

    @staticmethod
    def of(program: Program) -> Cells:
        """Sort a program's columns by what takes time and what does not; halves of pairs come last, two by two."""
        columns, timed = program.columns, program.timed_columns
        order = np.argsort(timed.paired, kind="stable") if timed.paired.any() else slice(None)
        work = (column[order] for column in (timed.stage, timed.code, timed.microbatch, timed.cell, timed.rank))
        other = np.flatnonzero(~columns.timed)
        rank = columns.rank[other]
        follows = (np.cumsum(columns.timed & columns.heads) - 1)[other]
        follows[follows < np.cumsum((0, *timed.lengths))[rank]] = -1
        others = (columns.stage[other], columns.code[other], columns.microbatch[other], rank, follows)
        ranks = np.repeat(np.arange(columns.num_ranks), timed.lengths)
        return Cells(columns.num_ranks, ranks, Work(*work), *others)


def _complete(kind: Backward) -> Flags:
    """Return which sets of ops are all that a stage of this kind runs for a microbatch; bit i is the op of place i."""
    found = np.zeros(2 ** len(rules.NEEDS), dtype=bool)
    found[[sum(1 << PLACE[CODE[op]] for op in way) for way in rules.WAYS[kind]]] = True
    return found


_COMPLETE = {kind: _complete(kind) for kind in Backward}


def producers(columns: Columns, work: Work, num_stages: int, num_microbatches: int) -> Ints:
    """Return, per plain action, which other makes its input from a neighbouring stage (-1: none is needed).

    Checks along the way what the simulator relies on: nothing missing or twice, own-stage inputs earlier in the row.
    """
    place = PLACE[work.code]
    computing = np.flatnonzero(place >= 0)
    if len(computing) < num_stages * num_microbatches or np.any(work.microbatch[computing] < 0):
        raise NotCompilable
    size = num_stages * num_microbatches
    where = np.full(len(rules.NEEDS) * size, -1, dtype=np.int64)
    home = (place * size + work.stage * num_microbatches + work.microbatch)[computing]
    where[home] = computing
    if np.count_nonzero(where >= 0) != len(computing):
        raise NotCompilable
    done = (1 << np.arange(len(rules.NEEDS))) @ (where.reshape(len(rules.NEEDS), size) >= 0)
    if not _COMPLETE[Backward.WHOLE][done].all():
        # Not every stage trains; then frozen ones must be frozen for all microbatches.
        for kind, ops in zip(columns.backwards(num_stages), done.reshape(num_stages, num_microbatches), strict=True):
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
            found = where[PLACE[CODE[need.ops[0]]] * size + pair]
            for other in need.ops[1:]:
                found = np.maximum(found, where[PLACE[CODE[other]] * size + pair])
            if np.any(found < 0):
                raise NotCompilable
            if need.stage_offset:
                producer[at] = found
            elif np.any((work.rank[found] != work.rank[at]) | (work.node[found] >= work.node[at])):
                raise NotCompilable
    return producer
