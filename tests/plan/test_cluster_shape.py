"""Formulas of a pipeline's shape on a cluster, against the simulator."""

from __future__ import annotations

import pytest

from drumline.core.simulate.simulate import simulate
from drumline.plan.cluster.spent import Ops, Spent
from drumline.plan.cluster.stages import (
    num_sides,
    pairs_held,
    simulated,
    simulated_few,
    stages_of,
)
from drumline.schedules import find, schedules
from drumline.schedules.formulas import Pace, Paces

FORMULAS = [name for name, schedule in schedules().items() if schedule.makespan is not None]
COUNTED = [*FORMULAS, "zb-h2", "v-half", "v-min", "interleaved-zb", "chimera", "hanayo"]


def stages_per_rank(name: str) -> int:
    return schedules()[name].stages_per_rank


def makespan(name: str, paces: list[Pace], num_microbatches: int, per_rank: int = 1, hop_seconds: float = 0.0) -> float:
    formula = find(name).makespan
    assert formula is not None
    return formula(Paces(paces, num_microbatches, per_rank, hop_seconds))


def test_formulas_are_there() -> None:
    assert len(FORMULAS) == 10
    assert makespan("zb-v", [Pace(4, 2.0, 2.0, 2.0)], 8, 2) == 51.0


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 12)])
def test_stages_and_pairs_are_those_of_the_program(name: str, num_ranks: int, num_microbatches: int) -> None:
    program = schedules()[name].build(num_ranks, num_microbatches)
    per_rank = stages_per_rank(name)
    found = [stages_of(name, rank, num_ranks, per_rank) for rank in range(num_ranks)]
    assert [sorted(stage for stage, _ in pair) for pair in found] == [
        sorted(program.placement.stages_of(rank)) for rank in range(num_ranks)
    ]
    peaks = simulate(program).peak_activations
    held = [pairs_held(name, rank, num_ranks, num_microbatches, per_rank) for rank in range(num_ranks)]
    assert held == list(peaks)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 8), (4, 32), (8, 32)])
def test_formulas_are_the_simulator_where_stages_are_equal(name: str, num_ranks: int, num_microbatches: int) -> None:
    per_rank = stages_per_rank(name)
    stages = [Ops(Spent(1.0), Spent(), Spent(1.0), Spent(1.0))] * (num_ranks * per_rank)
    ours = makespan(name, [Pace(num_ranks, per_rank, per_rank, per_rank)], num_microbatches, per_rank)
    assert ours == pytest.approx(simulated(name, stages, num_ranks, num_microbatches).makespan)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("head", [1.1, 1.5])
def test_formulas_are_near_the_simulator_where_the_last_stage_is_heavier(name: str, head: float) -> None:
    num_ranks, num_microbatches, per_rank = 8, 64, stages_per_rank(name)
    num_stages = num_ranks * per_rank
    ops = Ops(Spent(1.0), Spent(), Spent(1.2), Spent(0.9))
    stages = [ops] * (num_stages - 1) + [ops.times(head)]
    places = [[stage for stage, _ in stages_of(name, rank, num_ranks, per_rank)] for rank in range(num_ranks)]
    heavy = next(rank for rank, held in enumerate(places) if num_stages - 1 in held)
    paces = []
    for rank, held in enumerate(places):
        factor = sum(head if rank == heavy and stage == num_stages - 1 else 1.0 for stage in held)
        paces.append(Pace(1, 1.0 * factor, 1.2 * factor, 0.9 * factor))
    ours = makespan(name, paces, num_microbatches, per_rank)
    assert ours == pytest.approx(simulated(name, stages, num_ranks, num_microbatches).makespan, rel=0.04)


def test_latency_costs_1f1b_what_it_costs_in_the_simulator() -> None:
    stages = [Ops(Spent(10.0), Spent(), Spent(10.0), Spent(6.0))] * 8
    assert makespan("1f1b", [Pace(8, 10.0, 10.0, 6.0)], 24, hop_seconds=1.0) == pytest.approx(860, abs=2)
    assert simulated("1f1b", stages, 8, 24, hop_seconds=1.0).makespan == 860


def test_a_wave_turns_around_inside_of_a_rank() -> None:
    assert [num_sides("zb-v", stage, 4, 8) for stage in range(8)] == [1, 2, 2, 1, 1, 2, 2, 1]
    assert [num_sides("interleaved-1f1b", stage, 4, 8) for stage in range(8)] == [1, 2, 2, 2, 2, 2, 2, 1]
    assert num_sides("1f1b", 0, 1, 1) == 0


@pytest.mark.parametrize("name", ["zb-h2", "v-half", "v-min", "chimera", "hanayo", "interleaved-zb"])
def test_a_few_microbatches_tell_what_many_take(name: str) -> None:
    stages = [Ops(Spent(1.0), Spent(), Spent(2.1), Spent(0.9))] * (4 * stages_per_rank(name))
    assert simulated_few(name, stages, 4, 40) == pytest.approx(simulated(name, stages, 4, 40).makespan, rel=0.01)
