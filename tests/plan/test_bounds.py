"""Lower bounds and the search at unequal costs: rounding, directions, copies, orders."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.core.costs import Costs, Edge
from drumline.core.placement import Placement
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds.instance import B, I, Instance
from drumline.plan.search.bounds.lower_bounds import BOUNDS, lower_bound
from drumline.plan.search.moves import Neighbourhood
from drumline.plan.search.objective import Jitter, Objective

TWO = Placement.linear(2)
BOTH_WAYS = Placement.bidirectional(2, mirrored=[1])


def test_rounded_sizes_bound_as_whole_ones_do() -> None:
    tenths = Instance(Costs(activation_bytes=0.1), Placement.linear(4), 8, Limit(max_bytes=0.3))
    whole = Instance(Costs(activation_bytes=1), Placement.linear(4), 8, Limit(max_bytes=3))
    assert lower_bound(tenths) == lower_bound(whole)


def test_a_whole_backward_that_is_shorter_than_its_half_is_bounded_by_itself() -> None:
    instance = Instance(Costs(backward=2, backward_input=4, backward_weight=4), TWO, 1)
    reached = simulate(instance.joined, instance.costs).makespan
    assert reached == 6
    assert all(bound(instance, "makespan") <= reached for bound in BOUNDS.values())


@pytest.mark.parametrize("there", [(0, 1), (1, 0)])
def test_a_slow_link_one_way_is_passed_once(there: tuple[int, int]) -> None:
    for limit in (Limit(), Limit(max_activations=1)):
        instance = Instance(Costs(edges={there: Edge(latency=5)}), TWO, 1, limit)
        reached = simulate(instance.plain, instance.costs).makespan
        assert reached == 5 + 5
        assert all(bound(instance, "makespan") <= reached for bound in BOUNDS.values())
        assert lower_bound(instance).value == reached


@pytest.mark.parametrize("placement", [TWO, Placement.v(2), BOTH_WAYS])
@pytest.mark.parametrize("bandwidth", [1.0, float("inf")])
def test_rows_are_measured_as_the_simulator_times_their_program(placement: Placement, bandwidth: float) -> None:
    costs = Costs(
        forward=1.0,
        backward=2.5,
        reduce=3.0,
        message_bytes=[1.0, 2.0, 3.0, 0.0][-placement.num_stages :],
        bytes_per_second=bandwidth,
        edges={(0, 1): Edge(0.5, bandwidth), (1, 0): Edge(2.0, bandwidth / 4)},
    )
    instance = Instance(costs, placement, 3)
    for program in (instance.plain, instance.joined):
        rows = instance.rows_of(program)
        assert rows is not None
        measured = Objective(instance).measure(rows)
        assert measured is not None
        assert measured.value == pytest.approx(simulate(program, costs).makespan)


def test_a_limit_in_bytes_counts_what_is_there_always() -> None:
    costs = Costs(activation_bytes=1, weight_bytes=10)
    fit, not_fit = (Instance(costs, TWO, 3, Limit(max_bytes=most)) for most in (11, 10.5))
    assert fit.rows_fit(fit.plain)
    assert not not_fit.rows_fit(not_fit.plain)


def test_a_whole_backward_varies_as_its_input_half_does() -> None:
    factors = Jitter(spread=0.3).factors(Instance(Costs(), TWO, 2))
    assert (factors[B::4] == factors[I::4]).all()
    assert factors[B::4].std() > 0.1


@pytest.mark.parametrize("kind", [I, B])
@pytest.mark.parametrize("factors", [1.0, (1.0, 2.0)])
def test_a_backward_stays_behind_the_one_of_its_rank_that_it_needs(kind: int, factors: Any) -> None:
    instance = Instance(Costs(microbatch_factor=factors), Placement.v(2), 2)  # stages 1 and 2 are both on rank 1
    around = Neighbourhood(instance)
    assert around.conflict(instance.number(2, kind, 1), instance.number(1, I, 1))
    assert not around.conflict(instance.number(2, kind, 0), instance.number(1, I, 1))
