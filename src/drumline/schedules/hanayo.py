"""Hanayo (SC'23, arXiv 2308.15762): stages in a zig-zag, so that microbatches run through the ranks in waves.

    4 ranks, 8 stages, 3 microbatches

    rank 0 |F0 F1 F2 .. .. .. .. f0 b0--- f1 b1--- f2 b2--- .. .. .. .. .. .. B0--- .. .. B1--- .. .. B2--- |
    rank 1 |.. F0 F1 F2 .. .. f0 .. f1 .. b0--- f2 b1--- .. b2--- .. .. B0--- .. .. B1--- .. .. B2--- .. .. |
    rank 2 |.. .. F0 F1 F2 f0 .. f1 .. f2 .. .. b0--- .. b1--- .. B0--- b2--- B1--- .. .. B2--- .. .. .. .. |
    rank 3 |.. .. .. F0 f0 F1 f1 F2 f2 .. .. .. .. .. b0--- B0--- b1--- B1--- b2--- B2--- .. .. .. .. .. .. |

v stages per rank form v/2 waves. Each wave passes every rank on its way down and again on its way up, like Chimera's
two directions, but with one copy of the weights. The recipe finds the order by running it, with a backward taking two
slots. A rank alternates forwards and backwards if both are ready: the forward that is furthest along, the oldest
backward. At most 2P microbatches are in progress. We could not reproduce the paper's own bubble ratio,
(2P-2)/(3PW+P-1).
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from drumline.core.action import Action, B, F, Op
from drumline.core.graph import CODE, Number
from drumline.core.kernel.library import Kernel, kernel
from drumline.core.placement import Placement
from drumline.schedules.cells import blank
from drumline.schedules.registry import schedule

_CODES = np.array([CODE[op] for op in (Op.FORWARD, Op.BACKWARD)], dtype=Number)


@schedule(
    "hanayo",
    summary="waves over a zig-zag of v stages per rank: interleaved 1F1B's bubble, turns stay on their rank",
    stages_per_rank=2,
    stage_counts="even",
)
def hanayo(num_ranks: int, *, num_microbatches: int, stages_per_rank: int = 2) -> Iterable[Iterable[Action]]:
    """Run the waves and record what each rank does."""
    homes = Placement.v(num_ranks, stages_per_rank=stages_per_rank).homes
    library = kernel()
    if library is None:
        return _in_python(num_ranks, num_microbatches, homes)
    length = 2 * stages_per_rank * num_microbatches
    every = blank(num_ranks * length)
    counts = num_ranks, num_microbatches, len(homes), np.array(homes, dtype=np.int64), 2 * num_ranks
    if library.waves(*counts, _CODES, every.stage, every.code, every.microbatch) == Kernel.OUT_OF_MEMORY:
        raise MemoryError(f"no memory to run waves on {num_ranks} ranks")
    return every.rows_of(length)


def _in_python(num_ranks: int, num_microbatches: int, homes: tuple[int, ...]) -> list[list[Action]]:
    """Return the same rows, without a kernel."""
    # The path of a microbatch: forward through all stages, then backward through all of them.
    turn, way = len(homes), homes + homes[::-1]
    ranks = [_RankRow() for _ in range(num_ranks)]
    fresh = iter(range(num_microbatches))
    for m in islice(fresh, 2 * num_ranks):
        ranks[0].add_forward(0, m)
    running: list[tuple[int, int, int, int]] = []
    time = 0
    while True:
        for number, rank in enumerate(ranks):
            if rank.free <= time and (rank.forwards or rank.backwards):
                step, m = rank.take(turn, time)
                heappush(running, (rank.free, number, step, m))
        if not running:
            return [rank.row for rank in ranks]
        time = running[0][0]
        while running and running[0][0] == time:
            _, _, step, m = heappop(running)
            if step + 1 < turn:
                ranks[way[step + 1]].add_forward(step + 1, m)
            elif step + 1 < len(way):
                ranks[way[step + 1]].add_backward(step + 1, m)
            elif (entering := next(fresh, None)) is not None:
                ranks[0].add_forward(0, entering)


class _RankRow:
    """One rank's row so far, and the steps that are ready for it, the next one first."""

    def __init__(self) -> None:
        self.row: list[Action] = []
        self.free = 0
        self.forwards: list[tuple[int, int]] = []
        self.backwards: list[tuple[int, int]] = []
        self.forward_next = True

    def add_forward(self, step: int, m: int) -> None:
        """Add a forward; the one that is furthest along comes first."""
        heappush(self.forwards, (-step, m))

    def add_backward(self, step: int, m: int) -> None:
        """Add a backward; the oldest comes first."""
        heappush(self.backwards, (m, step))

    def take(self, turn: int, time: int) -> tuple[int, int]:
        """Run the next step, alternating forwards and backwards if both are ready, and return it."""
        if self.forwards and (self.forward_next or not self.backwards):
            negative, m = heappop(self.forwards)
            self.row.append(F(-negative, m))
            self.free, self.forward_next = time + 1, False
            return -negative, m
        m, step = heappop(self.backwards)
        self.row.append(B(2 * turn - 1 - step, m))
        self.free, self.forward_next = time + 2, True
        return step, m
