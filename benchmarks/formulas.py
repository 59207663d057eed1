"""Formulas of makespans against the simulator, for every schedule that the cluster planner considers.

    python benchmarks/formulas.py [--most PAIRS]

For ranks from 2 to 64, microbatches from 1 to 512 and several ratios of F, I, W and latency it compares what `estimate`
takes: the formula where it holds, and otherwise a simulation of a few microbatches. It prints the worst of each
schedule, and how far the bare formula would be. `--most` leaves out larger programs (default 30,000 pairs).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.spent import Ops, Spent
from drumline.plan.cluster.stages import formula_holds, simulated, simulated_few, stages_of
from drumline.plan.layouts.pins import tried_schedules
from drumline.schedules import find
from drumline.schedules.formulas import Pace, Paces

RANKS = (2, 3, 4, 8, 16, 32, 64)
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
COSTS = ((1.0, 1.0, 1.0, 0.0), (1.0, 2.0, 0.8, 0.0), (1.0, 1.1, 0.9, 0.05))
# The last stage, or the first and the last, take another share of the others' time.
ENDS = ((1.0, 1.0), (1.0, 1.3), (0.85, 0.85))


@dataclass(frozen=True, slots=True)
class Miss:
    """How far the estimate and the bare formula are from the simulator, and for what."""

    ours: float
    formula: float
    words: str


def misses(name: str, per_rank: int, most: int) -> Iterator[Miss]:
    """Yield every case of a schedule that has at most so many pairs."""
    schedule = find(name)
    for ranks in RANKS:
        for count in MICROBATCHES:
            suits = schedule.suits is None or schedule.suits(ranks, count, per_rank)
            refused = schedule.refusal(ranks, count, per_rank) is not None
            if ranks * count * per_rank > most or refused or not suits:
                continue
            for costs in COSTS:
                for ends in ENDS:
                    yield _miss(name, ranks, count, per_rank, costs, ends)


def _miss(
    name: str,
    ranks: int,
    count: int,
    per_rank: int,
    costs: tuple[float, float, float, float],
    ends: tuple[float, float],
) -> Miss:
    num_stages, (*each, latency) = ranks * per_rank, costs
    shares = [ends[0], *[1.0] * (num_stages - 2), ends[1]]
    stages = [Ops(Spent(each[0] * by), Spent(), Spent(each[1] * by), Spent(each[2] * by)) for by in shares]
    paces = []
    for rank in range(ranks):
        by = sum(part * shares[stage] for stage, part in stages_of(name, rank, ranks, per_rank))
        paces.append(Pace(1, *(value * by for value in each)))
    formula = find(name).makespan
    assert formula is not None, "the schedules to plan with have one"
    bare = formula(Paces(paces, count, per_rank, latency))
    layout = Layout(batch=count, pipeline=ranks, stages_per_rank=per_rank, schedule=name)
    ours = bare
    if not formula_holds(layout, stages):
        ours = simulated_few(name, stages, ranks, count, hop_seconds=latency)
    real = simulated(name, stages, ranks, count, hop_seconds=latency).makespan
    words = f"{ranks} ranks, {count} microbatches, F I W {costs[:3]}, latency {latency}, ends {ends}"
    return Miss(ours / real - 1, bare / real - 1, words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=30_000, metavar="PAIRS", help="pairs of the largest program")
    most = parser.parse_args().most
    print(f"{'schedule':18} {'stages':>6} {'cases':>6} {'worst':>7} {'bare formula':>12}   where ours is worst")
    for name, counts in tried_schedules().items():
        for per_rank in counts:
            found = list(misses(name, per_rank, most))
            worst = max(found, key=lambda miss: abs(miss.ours))
            bare = max(found, key=lambda miss: abs(miss.formula)).formula
            print(f"{name:18} {per_rank:6} {len(found):6} {worst.ours:+7.1%} {bare:+12.1%}   {worst.words}", flush=True)


if __name__ == "__main__":
    main()
