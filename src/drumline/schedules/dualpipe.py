"""DualPipe (arXiv 2412.19437): two opposed directions whose forwards and backwards overlap.

    4 ranks, 4 stages, 8 microbatches

    rank 0 |F0 F1 F2 f4 i4 w4 f5 F3b5---- .. f6B0---- b6--- .. f7B1---- b7--- I2 W2 I3 W3 |
    rank 1 |.. F0 f4 F1 f5 F2 b4--- f6B0---- F3b5---- f7B1---- b6--- B2--- .. i7 I3 w7 W3 |
    rank 2 |.. f4 F0 f5 F1 f6 B0--- F2b4---- f7B1---- F3b5---- B2--- b6--- .. I3 i7 W3 w7 |
    rank 3 |f4 f5 f6 F0 I0 W0 F1 f7B1---- .. F2b4---- B2--- .. F3b5---- B3--- i6 w6 i7 w7 |

Every stage has two copies, on ranks r and P-1-r. The first half of the microbatches goes down, the second half up, and
the copies exchange gradients at the end. The recipe needs M even and M >= 2P; other values of M use part of a larger
run.

Its eight steps serve both DualPipe and DualPipeV. A rank works on two flows. Flow 0 enters at the near end of its half;
flow 1 comes back from the far end. In DualPipe these are two directions, in DualPipeV the two legs of one V. `distance`
is the distance of the rank from the end where flow 0 enters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from drumline.core.action import Op
from drumline.core.graph import CODE, Ints, Number
from drumline.schedules.cells import Cells, cells, joined
from drumline.schedules.formulas import Pace, idling
from drumline.schedules.registry import schedule

# What a rank does with its flows: the op's place in `_OPS`, twice, and one more for the far flow. The weight half is
# that of the oldest input half whose weights were not yet computed, of whichever flow.
_OPS = np.array([CODE[op] for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)], dtype=Number)
NEAR_F, FAR_F, NEAR_B, FAR_B, NEAR_I, FAR_I, W = range(7)
OVERLAPS = 8  # added to the first half of an overlapped pair


def idle(pace: Pace, num_ranks: int) -> float:
    """Return (P/2-1)(F&B+B-3W), where F&B takes as long as both; no W reduces it below 2F."""
    each = pace.forward + 2 * pace.backward_input - pace.backward_weight
    return (num_ranks / 2 - 1) * max(each, 2 * pace.forward)


@schedule(
    "dualpipe",
    summary="two directions overlap F with B: small bubble if F&B is fused; twice the weights",
    even_ranks=True,
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: num_ranks + 1,
    makespan=idling(idle),
    makespan_holds=lambda num_ranks, num_microbatches, stages_per_rank: num_ranks > 4,
    planned_with=(1,),
    suits=lambda num_ranks, num_microbatches, stages_per_rank: (
        num_ranks % 2 == 0 and num_microbatches % 2 == 0 and num_microbatches >= 2 * num_ranks
    ),
)
def dualpipe(num_ranks: int, *, num_microbatches: int) -> Iterator[Cells]:
    """Run the eight steps on every rank, then exchange the gradients of the two copies."""
    num_down = (num_microbatches + 1) // 2
    num_each = max(num_down, num_ranks)
    # Slots without a microbatch get a number that is trimmed later.
    spare = range(num_microbatches, num_microbatches + num_each)
    going_down = np.array([*range(num_down), *spare][:num_each])
    going_up = np.array([*range(num_down, num_microbatches), *spare][:num_each])
    for rank in range(num_ranks):
        mirror = num_ranks - 1 - rank
        down, up = (rank, going_down), (mirror, going_up)
        flows = (down, up) if rank < mirror else (up, down)
        held_stages = {rank, mirror} if num_microbatches > 1 else {rank}
        row = EightSteps(num_ranks // 2, min(rank, mirror), flows).row(num_microbatches)
        yield joined((row, cells(Op.REDUCE_GRAD, sorted(held_stages))))


@dataclass(frozen=True)
class EightSteps:
    """One rank's row; each of its two flows is a stage and the microbatches that pass through it."""

    half: int
    distance: int
    flows: tuple[tuple[int, Ints], tuple[int, Ints]]

    def steps(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield how often what is done; both flows must have as many microbatches, at least twice the half."""
        to_middle, count = self.half - self.distance - 1, len(self.flows[0][1])
        # 1. Forwards of the near flow fill the pipe.
        yield 2 * to_middle, (NEAR_F,)
        # 2. Both flows' forwards, until the first backward arrives.
        yield self.distance + 1, (NEAR_F, FAR_F)
        # 3. The far flow's backwards, split, alternating with its forwards.
        yield to_middle, (FAR_I, W, FAR_F)
        # 4. The main part: each flow's forward overlaps the other's backward.
        both = (NEAR_F + OVERLAPS, FAR_B, FAR_F + OVERLAPS, NEAR_B)
        # Next to the middle the first is not overlapped, so that the neighbours get the forward sooner.
        yield 1, (NEAR_F, FAR_B, FAR_F + OVERLAPS, NEAR_B) if to_middle == 0 else both
        yield count - 2 * self.half + self.distance, both
        # 5. The near flow has no forwards left.
        yield to_middle, (FAR_B, FAR_F + OVERLAPS, NEAR_B)
        # 6. Only backwards are left; the later half of them is split.
        whole, even = (self.distance + 1) // 2, self.distance % 2 == 0
        yield whole, (FAR_B, NEAR_B)
        yield int(even), (FAR_B, NEAR_I)
        yield whole, (FAR_I, NEAR_I)
        # 7. The near flow's last input halves, alternating with queued weight halves.
        yield to_middle, (W, NEAR_I)
        # 8. The remaining weight halves.
        yield 2 * whole + even, (W,)

    def row(self, num_microbatches: int) -> Cells:
        """Return the row's actions on microbatches below this; a pair that loses one half becomes the other half."""
        done = np.concatenate([np.tile(np.array(pattern, dtype=Number), count) for count, pattern in self.steps()])
        overlaps, done = done >= OVERLAPS, done % OVERLAPS
        flow, op = done % 2, done // 2
        stage, microbatch = np.array([self.flows[0][0], self.flows[1][0]], dtype=Number)[flow], np.empty_like(done)
        for number, (_, microbatches) in enumerate(self.flows):
            microbatch[(op == 0) & (flow == number)] = microbatches
            microbatch[((op == 1) | (op == 2)) & (flow == number)] = microbatches
        for column in (stage, microbatch):
            column[done == W] = column[op == 2]
        chosen = microbatch < num_microbatches
        overlaps &= chosen & np.append(chosen[1:], False)
        return Cells(stage, _OPS[op], microbatch, overlaps)[np.flatnonzero(chosen)]
