"""Measured steps replayed in the simulator, with and without their overhead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from drumline.core.action import Op
from drumline.core.costs import Costs, Edge
from drumline.core.measured.costs import costs_of, latencies, replay
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.schedules import generate
from names import NAMES, build
from simulated_runs import records_of


def measured(program: Program, costs: Costs, seed: int = 0) -> Measured:
    work = sum(part.op is not Op.REDUCE_GRAD for part in program.work())
    factors = 1 + np.random.default_rng(seed).random(work)
    return Measured(program, tuple(records_of(simulate(program, costs, factors=factors))))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "forward-only"])
def test_a_step_without_overhead_is_replayed_as_it_was(name: str) -> None:
    step = measured(build(name, 4, 8), Costs(edges={(0, 1): Edge(0.25)}))
    again = replay(step)
    assert again.makespan == pytest.approx(step.makespan)
    for ours, theirs in zip(again.tracks, step.tracks, strict=True):
        assert list(ours.ends) == pytest.approx(list(theirs.ends), abs=1e-6)


def test_overhead_is_what_a_replay_leaves_out() -> None:
    step = measured(build("1f1b", 2, 4), Costs())
    late = tuple(replace(record, starts=_later(record.starts), ends=_later(record.ends)) for record in step.records)
    delayed = Measured(step.program, late)
    assert delayed.makespan > step.makespan * 1.01
    assert replay(delayed).makespan == pytest.approx(step.makespan)


def _later(moments: Sequence[int]) -> list[int]:
    """Return moments, each a tenth of a second further behind the one before it."""
    return [moment + 100_000_000 * number for number, moment in enumerate(moments)]


def test_costs_over_several_steps_are_those_of_the_middle() -> None:
    program, costs = build("zb-h1", 2, 4), Costs(forward=[1, 2], comm=0.5)
    steps = [Measured(program, tuple(records_of(simulate(program, costs), step))) for step in range(3)]
    found = costs_of(steps)
    assert found.per_stage("forward", 2) == pytest.approx((1, 2))
    assert found.per_stage("backward_weight", 2) == pytest.approx((1, 1))
    assert {edge: item.latency for edge, item in latencies(steps).items()} == pytest.approx({(0, 1): 0.5, (1, 0): 0.5})


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_slices_are_replayed_as_they_were(name: str) -> None:
    program = generate(name, num_ranks=3, num_microbatches=2, slices=4)
    step = measured(program, Costs(attention=0.5, edges={(0, 1): Edge(0.25)}))
    assert replay(step).makespan == pytest.approx(step.makespan)


def test_costs_of_slices_are_those_of_a_microbatch_and_its_parts() -> None:
    program = generate("1f1b", num_ranks=2, num_microbatches=3, slices=4)
    costs = Costs(forward=[1, 2], backward=[2, 4], attention=0.5)
    step = Measured(program, tuple(records_of(simulate(program, costs))))
    found = [costs_of([step] * 3), step.measured_costs()]
    for each in found:
        assert each.slice_factor == pytest.approx(costs.factors(4, 4))
    assert found[0].per_stage("forward", 2) == pytest.approx((1, 2))
    assert simulate(program, found[0]).makespan == pytest.approx(step.makespan)
