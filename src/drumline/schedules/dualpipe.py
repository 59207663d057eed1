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

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from drumline.core.action import Action, Op, overlap
from drumline.schedules.formulas import Pace, idling
from drumline.schedules.orders import StageFlow, trim
from drumline.schedules.registry import schedule


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
def dualpipe(num_ranks: int, *, num_microbatches: int) -> Iterator[Iterator[Action]]:
    """Run the eight steps on every rank, then exchange the gradients of the two copies."""
    num_down = (num_microbatches + 1) // 2
    num_each = max(num_down, num_ranks)
    # Slots without a microbatch get a number that is trimmed later.
    spare = range(num_microbatches, num_microbatches + num_each)
    going_down = [*range(num_down), *spare][:num_each]
    going_up = [*range(num_down, num_microbatches), *spare][:num_each]
    for rank in range(num_ranks):
        mirror = num_ranks - 1 - rank
        down, up = StageFlow(rank, going_down), StageFlow(mirror, going_up)
        flows = (down, up) if rank < mirror else (up, down)
        row = trim(EightSteps(num_ranks // 2, min(rank, mirror), flows).row(), num_microbatches)
        held_stages = {rank, mirror} if num_microbatches > 1 else {rank}
        yield chain(row, (Action(stage, Op.REDUCE_GRAD) for stage in sorted(held_stages)))


@dataclass
class EightSteps:
    """One rank's row; keeps a queue of weight halves still to run."""

    half: int
    distance: int
    flows: tuple[StageFlow, StageFlow]
    owed: deque[Action] = field(default_factory=deque)

    def input_half(self, flow: StageFlow) -> Action:
        """Return the flow's next input half, and queue its weight half."""
        first, second = flow.split()
        self.owed.append(second)
        return first

    def weights(self) -> list[Action]:
        """Return the oldest queued weight half, if any."""
        return [self.owed.popleft()] if self.owed else []

    def row(self) -> Iterator[Action]:
        """Yield the rank's actions; both flows must have the same number of microbatches, at least twice the half."""
        near, far = self.flows
        to_middle = self.half - self.distance - 1
        # 1. Forwards of the near flow fill the pipe.
        for _ in range(2 * to_middle):
            yield near.forward()
        # 2. Both flows' forwards, until the first backward arrives.
        for _ in range(self.distance + 1):
            yield near.forward()
            yield far.forward()
        # 3. The far flow's backwards, split, alternating with its forwards.
        for _ in range(to_middle):
            yield self.input_half(far)
            yield from self.weights()
            yield far.forward()
        # 4. The main part: each flow's forward overlaps the other's backward.
        for turn in range(near.num_microbatches - 2 * self.half + self.distance + 1):
            if turn == 0 and to_middle == 0:
                # Not overlapped, so that the neighbours get the forward sooner.
                yield near.forward()
                yield far.backward()
            else:
                yield overlap(near.forward(), far.backward())
            yield overlap(far.forward(), near.backward())
        # 5. The near flow has no forwards left.
        for _ in range(to_middle):
            yield far.backward()
            yield overlap(far.forward(), near.backward())
        # 6. Only backwards are left; the later half of them is split.
        split = False
        for turn in range(self.distance + 1):
            split |= turn == (self.distance + 1) // 2 and self.distance % 2 == 1
            yield self.input_half(far) if split else far.backward()
            split |= turn == (self.distance + 1) // 2 and self.distance % 2 == 0
            yield self.input_half(near) if split else near.backward()
        # 7. The near flow's last input halves, alternating with queued weight halves.
        for _ in range(to_middle):
            yield from self.weights()
            yield self.input_half(near)
        # 8. The remaining weight halves.
        while self.owed:
            yield from self.weights()
