"""Time one program for many samples at once, if all actions of a stage and an op take the same seconds.

    seconds[op, stage, sample]     F of stage 0, F of stage 1, ...     one row each
    nodes, level by level          0F0 | 0F1 1F0 | 0F2 1F1 2F0 | ...   each takes its row

`makespans` takes the seconds of every action instead. This function needs less memory, and is faster by that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drumline.core import rules
from drumline.core.clock.evaluate import Order, latest_ends
from drumline.core.costs import Costs
from drumline.core.errors import CostsError
from drumline.core.graph import PLACE, Flags, Floats, Ints, Messages, NotCompilable
from drumline.core.program import Program, once_per_program
from drumline.core.simulate.simulate import compiled, invalid, node_order

STAGE_OPS = tuple(rules.NEEDS)


@dataclass(frozen=True, slots=True)
class _Rows:
    """For every node: the row of its seconds, and whether it waits for a message.

    The row after those of ops and stages holds zeros. The rows after that are the sums of these `pairs` of rows, for
    overlapped pairs.
    """

    order: Order
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
    table = np.concatenate([seconds.reshape(-1, seconds.shape[2]), np.zeros((1, seconds.shape[2]))])
    if len(rows.pairs):
        table = np.concatenate([table, table[rows.pairs].sum(axis=1)])
    lag = np.where(rows.crosses, comm, 0.0)[:, None] if comm and rows.crosses.any() else None
    return latest_ends(rows.order, table, rows.row, lag)


@once_per_program
def _rows(program: Program) -> _Rows:
    graph = compiled(program, Costs())
    order = node_order(program, Messages.LATENCY)
    place = PLACE[graph.work.code]
    nothing = len(STAGE_OPS) * program.num_stages
    row_of_work = np.where(place >= 0, place * program.num_stages + graph.work.stage, nothing)
    row = np.full(graph.num_nodes, nothing)
    row[graph.node] = row_of_work
    halves = np.flatnonzero(graph.work.paired).reshape(-1, 2)
    pairs, which = np.unique(row_of_work[halves], axis=0, return_inverse=True)
    row[graph.node[halves[:, 0]]] = nothing + 1 + which.reshape(-1)
    return _Rows(order, row, pairs, graph.crossing >= 0)
