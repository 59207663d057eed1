"""DualPipe (arXiv 2412.19437): two opposed directions whose forwards and backwards overlap.

    4 ranks, 4 stages, 8 microbatches

    rank 0 |F0 F1 F2 f4 i4 w4 f5 F3b5---- .. f6B0---- b6--- .. f7B1---- b7--- I2 W2 I3 W3 |
    rank 1 |.. F0 f4 F1 f5 F2 b4--- f6B0---- F3b5---- f7B1---- b6--- B2--- .. i7 I3 w7 W3 |
    rank 2 |.. f4 F0 f5 F1 f6 B0--- F2b4---- f7B1---- F3b5---- B2--- b6--- .. I3 i7 W3 w7 |
    rank 3 |f4 f5 f6 F0 I0 W0 F1 f7B1---- .. F2b4---- B2--- .. F3b5---- B3--- i6 w6 i7 w7 |

Every stage has two copies, on ranks r and P-1-r; the first half of the microbatches goes down, the second half up,
and the copies exchange gradients at the end. The recipe is made for M even and M >= 2P; any other M is cut out of a
larger run.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Action, Op
from drumline.schedules.eight_steps import EightSteps, idle
from drumline.schedules.formulas import idling
from drumline.schedules.orders import Flow, trim
from drumline.schedules.registry import schedule


@schedule(
    "dualpipe",
    summary="two directions overlap F with B: small bubble where F&B is fused; twice the weights",
    even_ranks=True,
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: num_ranks + 1,
    makespan=idling(idle),
)
def dualpipe(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
    """Run the eight steps on every rank, then exchange the two copies' gradients."""
    num_down = (num_microbatches + 1) // 2
    num_each = max(num_down, num_ranks)
    # What no microbatch is there for gets a number that is cut off.
    spare = range(num_microbatches, num_microbatches + num_each)
    going_down = [*range(num_down), *spare][:num_each]
    going_up = [*range(num_down, num_microbatches), *spare][:num_each]
    for rank in range(num_ranks):
        mirror = num_ranks - 1 - rank
        down, up = Flow(rank, going_down), Flow(mirror, going_up)
        flows = (down, up) if rank < mirror else (up, down)
        row = list(trim(EightSteps(num_ranks // 2, min(rank, mirror), flows).row(), num_microbatches))
        held = {rank, mirror} if num_microbatches > 1 else {rank}
        yield row + [Action(stage, Op.REDUCE_GRAD) for stage in sorted(held)]
