"""What a schedule does with ranks, as formulas: which stages a rank has, how many pairs it holds, how long it is idle.

Where there is no formula the program is made and counted or simulated, for as few microbatches as show everything: a step's
middle repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from drumline.core.costs import Costs
from drumline.core.simulate import simulate
from drumline.plan.cluster.work import Ops
from drumline.plan.held import held_by
from drumline.schedules import find, generate

V_PLACED = ("zb-v", "v-half", "v-min", "dualpipe-v", "hanayo")
MIRRORED = ("dualpipe", "chimera")
LOOPED = ("interleaved-1f1b", "looped-bfs", "interleaved-zb")


def stages_of(schedule: str, rank: int, num_ranks: int, stages_per_rank: int) -> tuple[tuple[int, float], ...]:
    """Return a rank's stages, each with the part of its microbatches that runs there.

    >>> stages_of("interleaved-1f1b", 1, 4, 2), stages_of("zb-v", 1, 4, 2), stages_of("dualpipe", 1, 4, 1)
    (((1, 1.0), (5, 1.0)), ((1, 1.0), (6, 1.0)), ((1, 0.5), (2, 0.5)))
    """
    if schedule in MIRRORED:
        return (rank, 0.5), (num_ranks - 1 - rank, 0.5)
    if schedule in V_PLACED:
        turn = 2 * num_ranks
        return tuple(
            (wave * turn + place, 1.0) for wave in range(stages_per_rank // 2) for place in (rank, turn - 1 - rank)
        )
    return tuple((rank + turn * num_ranks, 1.0) for turn in range(stages_per_rank))


def pairs_held(schedule: str, rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> int:
    """Return how many (stage, microbatch) pairs a rank holds at most.

    >>> [pairs_held("1f1b", rank, 4, 8, 1) for rank in range(4)], pairs_held("interleaved-1f1b", 0, 4, 8, 2)
    ([4, 3, 2, 1], 11)
    """
    most = num_microbatches * stages_per_rank
    after = num_ranks - 1 - rank
    formulas = {
        "naive": 1,
        "gpipe": most,
        "looped-bfs": most,
        "1f1b": after + 1,
        "interleaved-1f1b": (stages_per_rank - 1) * num_ranks + 2 * after + 1,
        "zb-h1": num_ranks,
        "zb-h2": 2 * num_ranks - 1,
        "zb-v": 2 * num_ranks,
        "dualpipe": num_ranks + 1,
        "dualpipe-v": 2 * num_ranks + 1,
    }
    found = formulas.get(schedule)
    if found is None:
        found = _counted(schedule, num_ranks, min(num_microbatches, _enough(num_ranks)), stages_per_rank)[rank]
    return min(found, most)


def makespan(
    schedule: str, stages: Sequence[Ops], num_ranks: int, num_microbatches: int, *, hop_seconds: float = 0.0
) -> float:
    """Return how long the ranks take, by formula where there is one; `hop_seconds` is the latency between two ranks.

    All microbatches at the pace of the busiest rank, and before and after that what the others take for one.

    >>> from drumline.plan.cluster.work import Work
    >>> equal = [Ops(Work(1.0), Work(), Work(1.0), Work(1.0))] * 4
    >>> [makespan(name, equal, 4, 8) for name in ("1f1b", "zb-h1")]
    [33.0, 27.0]
    """
    stages_per_rank = max(len(stages) // num_ranks, 1)
    forward, middle, last = (
        _by_rank(schedule, [getattr(one, part).total for one in stages], num_ranks, stages_per_rank)
        for part in ("forward", "backward_input", "backward_weight")
    )
    again = _by_rank(schedule, [one.again.total for one in stages], num_ranks, stages_per_rank)
    middle = [a + b for a, b in zip(middle, again, strict=True)]
    whole = [f + i + w for f, i, w in zip(forward, middle, last, strict=True)]
    busiest = max(range(num_ranks), key=lambda rank: whole[rank])
    steady = num_microbatches * whole[busiest]
    others = [rank for rank in range(num_ranks) if rank != busiest]
    hops = (num_ranks - 1) * hop_seconds
    if schedule == "naive":
        return num_microbatches * (sum(whole) + 2 * hops)
    if schedule in ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"):
        waits = 2 * hops * num_microbatches / num_ranks if schedule == "1f1b" else 0.0
        return steady + sum(whole[rank] for rank in others) / stages_per_rank + 2 * hops + waits
    if schedule in ("zb-h1", "zb-h2", "zb-v"):
        idle = sum(max(forward[rank] + middle[rank] - last[rank], 0.0) for rank in others) / stages_per_rank
        return steady + idle + 4 * hops
    if schedule in ("dualpipe", "dualpipe-v"):
        idle = sum(max(forward[rank] + 2 * middle[rank] - last[rank], 0.0) for rank in others) / stages_per_rank
        part = 1.0 if schedule == "dualpipe-v" else (num_ranks / 2 - 1) / max(num_ranks - 1, 1)
        return steady + idle * part + 4 * hops
    return _simulated(schedule, stages, num_ranks, num_microbatches, stages_per_rank, hop_seconds)


def simulated(
    schedule: str, stages: Sequence[Ops], num_ranks: int, num_microbatches: int, *, hop_seconds: float = 0.0
) -> float:
    """Return how long the ranks take by the simulator, every microbatch of it."""
    stages_per_rank = max(len(stages) // num_ranks, 1)
    program = generate(
        schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    return simulate(program, _costs(stages, hop_seconds)).makespan


def _costs(stages: Sequence[Ops], hop_seconds: float) -> Costs:
    return Costs(
        forward=[one.forward.total for one in stages],
        backward_input=[one.again.total + one.backward_input.total for one in stages],
        backward_weight=[one.backward_weight.total for one in stages],
        comm=hop_seconds,
    )


def _simulated(
    schedule: str,
    stages: Sequence[Ops],
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    hop_seconds: float,
) -> float:
    """Simulate as many microbatches as show everything, and add the others at the pace of the busiest rank."""
    few = min(num_microbatches, _enough(num_ranks))
    few -= (few - num_microbatches) % 2  # two directions want an even count where the whole has one
    whole = _by_rank(schedule, [one.total.total for one in stages], num_ranks, stages_per_rank)
    found = simulated(schedule, stages, num_ranks, few, hop_seconds=hop_seconds)
    return found + (num_microbatches - few) * max(whole)


def _by_rank(schedule: str, values: Sequence[float], num_ranks: int, stages_per_rank: int) -> list[float]:
    return [
        sum(part * values[stage] for stage, part in stages_of(schedule, rank, num_ranks, stages_per_rank))
        for rank in range(num_ranks)
    ]


def _enough(num_ranks: int) -> int:
    return 4 * num_ranks


@lru_cache(maxsize=256)
def _counted(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    program = find(schedule).build(num_ranks, num_microbatches, stages_per_rank)
    return tuple(
        max((sum(a + b for a, b in moment) for moment in rank.moments), default=0) for rank in held_by(program)
    )
