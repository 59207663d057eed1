"""Hanayo (SC'23, arXiv 2308.15762): stages in a zig-zag, so that microbatches run through the ranks in waves.

    4 ranks, 8 stages, 3 microbatches

    rank 0 |F0 F1 F2 .. .. .. .. f0 b0--- f1 b1--- f2 b2--- .. .. .. .. .. .. B0--- .. .. B1--- .. .. B2--- |
    rank 1 |.. F0 F1 F2 .. .. f0 .. f1 .. b0--- f2 b1--- .. b2--- .. .. B0--- .. .. B1--- .. .. B2--- .. .. |
    rank 2 |.. .. F0 F1 F2 f0 .. f1 .. f2 .. .. b0--- .. b1--- .. B0--- b2--- B1--- .. .. B2--- .. .. .. .. |
    rank 3 |.. .. .. F0 f0 F1 f1 F2 f2 .. .. .. .. .. b0--- B0--- b1--- B1--- b2--- B2--- .. .. .. .. .. .. |

v stages per rank are v/2 waves; each wave passes every rank on its way down and again on its way up, as Chimera's
two directions do, with one copy of the weights. The order is found by running it, a backward taking two slots: a
rank takes a forward and a backward in turn where both are there, the forward that is furthest along, the oldest
backward, and at most 2P microbatches are under way. The paper's own bubble ratio, (2P-2)/(3PW+P-1), we could not
reproduce.
"""

from __future__ import annotations

import heapq

from drumline.core.action import Action, B, F, Op
from drumline.core.placement import Placement
from drumline.schedules.registry import schedule


@schedule(
    "hanayo",
    summary="waves over a zig-zag of v stages per rank: interleaved 1F1B's bubble, turns stay on their rank",
    stages_per_rank=2,
    stage_counts="even",
)
def hanayo(num_ranks: int, *, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    """Run the waves and record what each rank does."""
    placement = Placement.v(num_ranks, stages_per_rank=stages_per_rank)
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    ready: list[list[Action]] = [[] for _ in range(num_ranks)]
    ready[0] = [F(0, m) for m in range(min(2 * num_ranks, num_microbatches))]
    fresh = iter(range(len(ready[0]), num_microbatches))
    free = [0] * num_ranks
    running: list[tuple[int, int, Action]] = []
    time = 0
    while any(ready) or running:
        for rank in range(num_ranks):
            if ready[rank] and free[rank] <= time:
                action = _pick(ready[rank], rows[rank])
                rows[rank].append(action)
                free[rank] = time + (1 if action.op is Op.FORWARD else 2)
                heapq.heappush(running, (free[rank], rank, action))
        time = running[0][0]
        while running and running[0][0] == time:
            done = heapq.heappop(running)[-1]
            following = _following(done, placement.num_stages)
            if following is None and (m := next(fresh, None)) is not None:
                following = F(0, m)
            if following is not None:
                ready[placement.rank_of(following.stage, 0)].append(following)
    return rows


def _pick(ready: list[Action], row: list[Action]) -> Action:
    """Take out what comes next: forwards and backwards in turn, the forward furthest along, the oldest backward."""
    last_op = row[-1].op if row else Op.BACKWARD
    picked = min(ready, key=lambda a: (a.op is last_op, -a.stage if a.op is Op.FORWARD else 0, a.microbatch or 0))
    ready.remove(picked)
    return picked


def _following(action: Action, num_stages: int) -> Action | None:
    m = action.microbatch or 0
    if action.op is Op.FORWARD:
        return F(action.stage + 1, m) if action.stage < num_stages - 1 else B(action.stage, m)
    return B(action.stage - 1, m) if action.stage > 0 else None
