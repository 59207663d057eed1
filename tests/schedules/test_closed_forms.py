"""Closed forms rank what is then simulated: how far each may be from the simulator, on random cases."""

from __future__ import annotations

import random

import pytest

from drumline.core.costs import Costs
from drumline.core.simulate.simulate import simulate
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.spent import Ops, Spent
from drumline.plan.cluster.stages import formula_holds, pairs_held, simulated_few, stages_of
from drumline.schedules import Schedule, schedules
from drumline.schedules.formulas import Pace, Paces
from some import some

TIMED = [each for each in schedules().values() if each.makespan is not None]
# A formula that holds for no counts only orders what is simulated.
HOLDING = [each for each in TIMED if each.makespan_holds is None or each.makespan_holds(8, 40, each.stages_per_rank)]


class Case:
    """Counts that a schedule admits, seconds of every stage, and a latency."""

    def __init__(self, rng: random.Random, schedule: Schedule, *, uneven: float, latency: float, wild: bool) -> None:
        self.schedule = schedule
        while True:
            self.ranks, self.count = rng.randint(2, 8), rng.randint(1, 40)
            self.per_rank = rng.choice(schedule.planned_with or (schedule.stages_per_rank,))
            counts = self.ranks, self.count, self.per_rank
            if schedule.refusal(*counts) is None and (schedule.suits is None or schedule.suits(*counts)):
                break
        ratios = [(0.3, 2.0)] * 3 if wild else [(1.0, 1.0), (0.8, 2.4), (0.5, 1.2)]  # F, I with recomputation, W
        self.each = [rng.uniform(*bounds) for bounds in ratios]
        self.latency = rng.choice([0.0, rng.uniform(0.0, latency)])
        self.shares = [1.0 + rng.uniform(0.0, uneven) for _ in range(self.ranks * self.per_rank)]

    @property
    def stages(self) -> list[Ops]:
        """The seconds of every stage."""
        f, i, w = self.each
        return [Ops(Spent(f * by), Spent(), Spent(i * by), Spent(w * by)) for by in self.shares]

    @property
    def formula(self) -> float:
        """What the schedule's formula says."""
        paces = []
        for rank in range(self.ranks):
            own = stages_of(self.schedule.name, rank, self.ranks, self.per_rank)
            by = sum(part * self.shares[stage] for stage, part in own)
            paces.append(Pace(1, *(value * by for value in self.each)))
        assert self.schedule.makespan is not None
        return self.schedule.makespan(Paces(paces, self.count, self.per_rank, self.latency))

    @property
    def holds(self) -> bool:
        """Whether the planner would take the formula."""
        layout = Layout(self.count, pipeline=self.ranks, stages_per_rank=self.per_rank, schedule=self.schedule.name)
        return formula_holds(layout, self.stages)

    @property
    def seconds(self) -> float:
        """What the simulator says."""
        f, i, w = ([value * by for by in self.shares] for value in self.each)
        program = self.schedule.build(self.ranks, self.count, self.per_rank)
        return simulate(program, Costs(forward=f, backward_input=i, backward_weight=w, comm=self.latency)).makespan

    @property
    def few(self) -> float:
        """What a simulation of a few microbatches says."""
        counts = self.ranks, self.count
        return simulated_few(self.schedule.name, self.stages, *counts, hop_seconds=self.latency)


def cases(schedule: Schedule, number: int, **limits: float | bool) -> list[Case]:
    """Draw so many cases, the same for every run."""
    rng = random.Random(schedule.name)
    return [Case(rng, schedule, **limits) for _ in range(number)]  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", HOLDING, ids=lambda each: each.name)
def test_a_formula_where_it_holds_is_within_two_percent(schedule: Schedule) -> None:
    """Stages that differ by less than 2%, passes as layers take them, messages of up to a twentieth of a forward."""
    drawn = [case for case in cases(schedule, 40, uneven=0.02, latency=0.05, wild=False) if case.holds]
    assert len(drawn) >= 10
    worst = max(abs(case.formula / case.seconds - 1.0) for case in drawn)
    assert worst < (0.025 if schedule.two_directions else 0.02)


@pytest.mark.parametrize("schedule", HOLDING, ids=lambda each: each.name)
def test_a_formula_where_it_holds_is_within_six_percent_of_anything(schedule: Schedule) -> None:
    """Passes that differ by up to seven times, messages of up to two thirds of a forward."""
    drawn = [case for case in cases(schedule, 40, uneven=0.02, latency=0.2, wild=True) if case.holds]
    assert len(drawn) >= 10
    assert max(abs(case.formula / case.seconds - 1.0) for case in drawn) < 0.06


@pytest.mark.parametrize("schedule", [each for each in TIMED if each.planned_with], ids=lambda each: each.name)
def test_a_few_microbatches_show_the_rest_within_four_percent(schedule: Schedule) -> None:
    """Of stages that differ by up to half; without two stages on a rank it is within one."""
    for case in some(cases(schedule, 25, uneven=0.5, latency=0.2, wild=True)):
        assert case.few == pytest.approx(case.seconds, rel=0.04 if case.per_rank > 1 else 0.01)


@pytest.mark.parametrize(
    "schedule", [each for each in schedules().values() if each.peak_pairs is not None], ids=lambda each: each.name
)
def test_no_rank_holds_more_pairs_than_the_formula_says(schedule: Schedule) -> None:
    for case in some(cases(schedule, 15, uneven=0.0, latency=0.0, wild=False)):
        counts = case.ranks, case.count, case.per_rank
        found = simulate(schedule.build(*counts)).peak_activations
        said = [pairs_held(schedule.name, rank, *counts) for rank in range(case.ranks)]
        assert all(some(real <= wanted for real, wanted in zip(found, said, strict=True)))
        assert max(found) >= max(said) - 1


@pytest.mark.parametrize("schedule", [each for each in TIMED if each.bubble is not None], ids=lambda each: each.name)
def test_no_step_idles_less_than_the_bubble_s_bound(schedule: Schedule) -> None:
    assert schedule.bubble is not None
    for case in some(cases(schedule, 15, uneven=0.0, latency=0.05, wild=True)):
        work = case.count * case.per_rank * sum(case.each)
        assert case.seconds / work - 1.0 >= schedule.bubble(case.ranks, case.count, case.per_rank) - 1e-9
