"""A program's rows as arrays, and who makes what each action needs: the first half of compiling."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import numpy as np

from drumline.core import rules
from drumline.core.action import Op
from drumline.core.graph import CODE, PLACE, TIMED, Ints, NotCompilable, Work
from drumline.core.program import Program

_STAGE, _MICROBATCH = itemgetter(0), itemgetter(2)


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
        """Take a program's rows apart."""
        actions = list(chain.from_iterable(program.rows))
        count = len(actions)
        stage = np.fromiter(map(_STAGE, actions), np.int64, count)
        code = np.frombuffer(bytes([CODE[action.op] for action in actions]), np.uint8).astype(np.int64)
        try:
            microbatch = np.fromiter(map(_MICROBATCH, actions), np.int64, count)
        except TypeError:  # parameter state has no microbatch
            numbers = [-1 if action.microbatch is None else action.microbatch for action in actions]
            microbatch = np.fromiter(numbers, np.int64, count)
        rank = np.repeat(np.arange(program.num_ranks), [len(row) for row in program.rows])
        timed = TIMED[code]
        number = np.cumsum(timed) - 1
        columns = [stage, code, microbatch, number, rank]
        other = np.flatnonzero(~timed)
        fused = np.flatnonzero(code == CODE[Op.OVERLAP])
        if len(other) or len(fused):
            plain = np.flatnonzero(timed & (code != CODE[Op.OVERLAP]))
            columns = [column[plain] for column in columns]
        if len(fused):
            halves = [part for at in fused.tolist() for part in actions[at].parts]
            each = len(halves) // len(fused)
            more = (
                np.fromiter(map(_STAGE, halves), np.int64, len(halves)),
                np.fromiter([CODE[half.op] for half in halves], np.int64, len(halves)),
                np.fromiter(
                    [-1 if half.microbatch is None else half.microbatch for half in halves], np.int64, len(halves)
                ),
                np.repeat(number[fused], each),
                np.repeat(rank[fused], each),
            )
            columns = [np.append(a, b) for a, b in zip(columns, more, strict=True)]
        first = np.searchsorted(rank[timed], np.arange(program.num_ranks))
        follows = np.where(number[other] >= first[rank[other]], number[other], -1)
        return Cells(
            program.num_ranks,
            rank[timed],
            Work(*columns),
            stage[other],
            code[other],
            microbatch[other],
            rank[other],
            follows,
        )


def producers(work: Work, num_stages: int, num_microbatches: int) -> Ints:
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
    forward, whole, first, second = (
        where[PLACE[CODE[op]] * size : (PLACE[CODE[op]] + 1) * size] >= 0
        for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    )
    trains = len(computing) > size
    if not forward.all() or np.any(first != second) or (trains and np.any(whole == first)):
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
