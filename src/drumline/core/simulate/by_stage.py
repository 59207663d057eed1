"""Time one program for many samples at once, if all actions of a stage and an op take the same seconds.

    seconds[op, stage, sample]     F of stage 0, F of stage 1, ...     one row each
    nodes, level by level          0F0 | 0F1 1F0 | 0F2 1F1 2F0 | ...   each takes its row

`makespans` takes the seconds of every action instead. This function needs less memory, and is faster by that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drumline.core import rules
from drumline.core.costs import Costs
from drumline.core.errors import CostsError
from drumline.core.graph import PLACE, Flags, Floats, Ints, Messages, NotCompilable
from drumline.core.program import Program, once_per_program
from drumline.core.simulate.evaluate import BLOCK, Levels, latest_ends
from drumline.core.simulate.simulate import compiled, invalid, levels

STAGE_OPS = tuple(rules.NEEDS)


@dataclass(frozen=True, slots=True)
class _Rows:
    """For every node in the order of the levels: the row of its seconds, and whether it waits for a message.

    The row after the last one holds zeros. `pairs` are the places of overlapped pairs, with the rows of both halves.
    """

    levels: Levels
    row: Ints
    pairs: Ints
    crosses: Flags


def makespans_by_stage(program: Program, seconds: Floats, *, comm: float = 0.0) -> Floats:
    """Return the makespan of every sample; `seconds` are (ops, stages, samples), the ops as in `STAGE_OPS`.

    A message between ranks takes `comm`. An overlapped pair takes the sum of its halves, and an update takes no time.

    >>> from drumline.schedules import generate
    >>> program = generate("1f1b", num_ranks=2, num_microbatches=2)
    >>> seconds = np.ones((4, 2, 2))
    >>> seconds[0, :, 1] = 2.0  # the second sample's forwards
    >>> makespans_by_stage(program, seconds).tolist()
    [6.0, 9.0]
    """
    if seconds.ndim != 3 or seconds.shape[:2] != (len(STAGE_OPS), program.num_stages):
        raise CostsError(
            f"seconds has the shape {seconds.shape}",
            expected=f"({len(STAGE_OPS)} ops, {program.num_stages} stages, samples)",
        )
    try:
        rows = _rows(program)
    except NotCompilable:
        raise invalid(program) from None
    samples = seconds.shape[2]
    table = np.concatenate([seconds.reshape(-1, samples), np.zeros((1, samples))])
    lag = np.where(rows.crosses, comm, 0.0)[:, None] if comm and rows.crosses.any() else None
    latest = np.zeros(samples)
    for first in range(0, samples, BLOCK):
        block = np.ascontiguousarray(table[:, first : first + BLOCK])
        each = block[rows.row]
        if len(rows.pairs):
            each[rows.pairs[:, 0]] = block[rows.pairs[:, 1]] + block[rows.pairs[:, 2]]
        latest[first : first + BLOCK] = latest_ends(rows.levels, each, lag)
    return latest


@once_per_program
def _rows(program: Program) -> _Rows:
    graph = compiled(program, Costs())
    order = levels(program, Messages.LATENCY)
    place = PLACE[graph.work.code]
    nothing = len(STAGE_OPS) * program.num_stages
    row_of_work = np.where(place >= 0, place * program.num_stages + graph.work.stage, nothing)
    row = np.full(graph.num_nodes, nothing)
    row[graph.node] = row_of_work
    halves = np.flatnonzero(graph.work.paired).reshape(-1, 2)
    at = np.empty(graph.num_nodes, dtype=np.int64)
    at[order.order] = np.arange(graph.num_nodes)
    pairs = np.column_stack([at[graph.node[halves[:, 0]]], row_of_work[halves]])
    return _Rows(order, row[order.order], pairs, (graph.crossing >= 0)[order.order])
