"""What a schedule does with ranks, as formulas: which stages a rank has, how many pairs it holds, how long it is idle.

Where there is no formula the program is made, and counted or simulated, for as few microbatches as show everything: a
step's middle repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from drumline.core.costs import Costs
from drumline.core.simulate.simulate import simulate
from drumline.plan.cluster.kernels import Ops
from drumline.plan.cut.peaks import held_by
from drumline.schedules import find, generate

V_PLACED = ("zb-v", "v-half", "v-min", "dualpipe-v", "hanayo")
MIRRORED = ("dualpipe", "chimera")


def stages_of(schedule: str, rank: int, num_ranks: int, stages_per_rank: int) -> tuple[tuple[int, float], ...]:
    """Return a rank's stages, each with the part of its microbatches that runs there.

    >>> stages_of("interleaved-1f1b", 1, 4, 2), stages_of("zb-v", 1, 4, 2), stages_of("dualpipe", 1, 4, 1)
    (((1, 1.0), (5, 1.0)), ((1, 1.0), (6, 1.0)), ((1, 0.5), (2, 0.5)))
    """
    if stages_per_rank == 1 and schedule not in MIRRORED:
        return ((rank, 1.0),)
    if schedule in MIRRORED:
        return (rank, 0.5), (num_ranks - 1 - rank, 0.5)
    if schedule in V_PLACED:
        turn = 2 * num_ranks
        places = (rank, turn - 1 - rank)
        return tuple((wave * turn + place, 1.0) for wave in range(stages_per_rank // 2) for place in places)
    return tuple((rank + turn * num_ranks, 1.0) for turn in range(stages_per_rank))


def num_sides(schedule: str, stage: int, num_ranks: int, num_stages: int) -> int:
    """Return on how many sides a stage has a neighbour on another rank.

    >>> [num_sides("1f1b", stage, 4, 4) for stage in range(4)], [num_sides("zb-v", stage, 2, 4) for stage in range(4)]
    ([1, 2, 2, 1], [1, 1, 1, 1])
    """
    if num_ranks == 1:
        return 0
    sides = 2 - (stage == 0) - (stage == num_stages - 1)
    if schedule in V_PLACED:  # the wave turns around inside of the first and the last rank
        turns_before, turns_after = stage % num_ranks == 0, (stage + 1) % num_ranks == 0
        sides -= (turns_before and stage > 0) + (turns_after and stage < num_stages - 1)
    return sides


def pairs_held(schedule: str, rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> int:
    """Return how many (stage, microbatch) pairs a rank holds at most.

    >>> [pairs_held("1f1b", rank, 4, 8, 1) for rank in range(4)], pairs_held("interleaved-1f1b", 0, 4, 8, 2)
    ([4, 3, 2, 1], 11)
    """
    most = num_microbatches * stages_per_rank
    after = num_ranks - 1 - rank
    if schedule == "1f1b":
        return min(after + 1, most)
    formulas = {
        "naive": 1,
        "gpipe": most,
        "looped-bfs": most,
        "interleaved-1f1b": (stages_per_rank - 1) * num_ranks + 2 * after + 1,
        "zb-h1": num_ranks,
        "zb-h2": 2 * num_ranks - 1,
        "zb-v": 2 * num_ranks,
        "v-half": 2 * (num_ranks // 2 + 1) if num_ranks > 1 else 2,
        "dualpipe": num_ranks + 1,
        "dualpipe-v": 2 * num_ranks + 1,
    }
    found = formulas.get(schedule)
    if found is None:
        found = _counted(schedule, num_ranks, _few(num_ranks, num_microbatches), stages_per_rank)[rank]
    return min(found, most)


@dataclass(frozen=True, slots=True)
class Pace:
    """Ranks that take the same for a microbatch: how many, and the seconds of F, of I with what it recomputes, of W."""

    count: int
    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """Return all seconds of a microbatch."""
        return self.forward + self.backward_input + self.backward_weight


FORMULAS = (
    "naive",
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "zb-h1",
    "zb-v",
    "v-half",
    "dualpipe",
    "dualpipe-v",
)


def makespan(
    schedule: str,
    paces: Sequence[Pace],
    num_microbatches: int,
    stages_per_rank: int = 1,
    hop_seconds: float = 0.0,
) -> float:
    """Return how long the ranks take, by formula; `hop_seconds` is the latency between two ranks.

    All microbatches at the pace of the busiest rank, and before and after that what the others take for one.

    >>> [makespan(name, [Pace(4, 1.0, 1.0, 1.0)], 8) for name in ("1f1b", "zb-h1")]
    [33.0, 27.0]
    >>> makespan("zb-v", [Pace(4, 2.0, 2.0, 2.0)], 8, stages_per_rank=2)
    51.0
    """
    num_ranks = sum(one.count for one in paces)
    busiest = max(paces, key=_total)
    others = [(one, one.count - (one is busiest)) for one in paces]
    steady = num_microbatches * busiest.total
    hops = (num_ranks - 1) * hop_seconds
    if schedule == "naive":
        return num_microbatches * (sum(one.count * one.total for one in paces) + 2 * hops)
    if schedule == "v-half" and num_ranks > 1:
        # Its pattern is made for equal F, I and W: where I is longer than F and half of W, every microbatch waits.
        lost = sum(count * (one.forward + 3 * one.backward_input - one.backward_weight) for one, count in others)
        wait = max(2 * (busiest.backward_input - busiest.forward) - busiest.backward_weight, 0.0)
        late = max(num_microbatches - num_ranks / 2 - 1, 0.0) * wait
        return steady + (lost + late) / stages_per_rank + 8 * hops
    if schedule in _IDLE:
        idle = _IDLE[schedule]
        mean = sum(count * idle(one, num_ranks) for one, count in others) / max(num_ranks - 1, 1)
        return steady + mean / stages_per_rank + 4 * hops
    waits = 2 * hops * num_microbatches / num_ranks if schedule == "1f1b" else 0.0
    return steady + sum(count * one.total for one, count in others) / stages_per_rank + 2 * hops + waits


def _total(pace: Pace) -> float:
    return pace.total


def _zb_h1(pace: Pace, num_ranks: int) -> float:
    """Return (P-1)(F+I-W); a W that is longer than F or I fills no more than they leave."""
    fills = min(pace.forward, pace.backward_input, pace.backward_weight)
    return (num_ranks - 1) * (pace.forward + pace.backward_input - fills)


def _zb_v(pace: Pace, num_ranks: int) -> float:
    """Return what the hand-made order is idle, by a formula that was read off the simulator; (P-1)F at F = I = W."""
    forward, back = pace.forward, pace.backward_input
    each = max(back, pace.backward_weight, 2 * forward - back)
    return (num_ranks - 2) * each + max(forward, back) if num_ranks > 1 else 0.0


def _dualpipe(pace: Pace, num_ranks: int) -> float:
    """Return (P/2-1)(F&B+B-3W), where an F&B takes as long as both; no W shortens it below 2F."""
    each = pace.forward + 2 * pace.backward_input - pace.backward_weight
    return (num_ranks / 2 - 1) * max(each, 2 * pace.forward)


def _dualpipe_v(pace: Pace, num_ranks: int) -> float:
    """Return the same of twice as many ranks, folded."""
    return _dualpipe(pace, 2 * num_ranks)


_IDLE: dict[str, Callable[[Pace, int], float]] = {
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
}


def simulated(
    schedule: str, stages: Sequence[Ops], num_ranks: int, num_microbatches: int, *, hop_seconds: float = 0.0
) -> float:
    """Return how long the ranks take by the simulator, every microbatch of it.

    >>> from drumline.plan.cluster.kernels import Work
    >>> simulated("zb-h1", [Ops(Work(1.0), Work(), Work(1.0), Work(1.0))] * 4, 4, 8)
    27.0
    """
    costs = Costs(
        forward=[one.forward.total for one in stages],
        backward_input=[one.again.total + one.backward_input.total for one in stages],
        backward_weight=[one.backward_weight.total for one in stages],
        comm=hop_seconds,
    )
    per_rank = max(len(stages) // num_ranks, 1)
    program = generate(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=per_rank)
    return simulate(program, costs).makespan


def simulated_few(
    schedule: str, stages: Sequence[Ops], num_ranks: int, num_microbatches: int, *, hop_seconds: float = 0.0
) -> float:
    """Simulate as many microbatches as show everything, and add the others at the pace that these have at last."""
    few = _few(num_ranks, num_microbatches)
    taken = simulated(schedule, stages, num_ranks, few, hop_seconds=hop_seconds)
    if few == num_microbatches:
        return taken
    fewer = few - max(num_ranks // 2 * 2, 2)
    before = simulated(schedule, stages, num_ranks, fewer, hop_seconds=hop_seconds)
    return taken + (num_microbatches - few) * (taken - before) / (few - fewer)


def _few(num_ranks: int, num_microbatches: int) -> int:
    """Return a smaller count that shows the same; two directions want an even one where the whole is even."""
    return num_microbatches if num_microbatches <= 4 * num_ranks else 4 * num_ranks + num_microbatches % 2


@lru_cache(maxsize=256)
def _counted(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    program = find(schedule).build(num_ranks, num_microbatches, stages_per_rank)
    return tuple(
        max((sum(a + b for a, b in moment) for moment in rank.moments), default=0) for rank in held_by(program)
    )
