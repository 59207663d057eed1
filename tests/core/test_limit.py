"""What a limit admits, and limits that prove nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from drumline.core.costs import Costs
from drumline.core.errors import CostsError
from drumline.core.placement import Placement
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.attribute import attribute
from drumline.core.timeline.idle import Cause, Limit
from drumline.plan.cut.chain import BlockCosts
from drumline.plan.cut.partition import partition
from drumline.plan.cut.peaks import HeldPairs
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.pareto import pareto
from drumline.plan.search.search import search
from drumline.report.compare import compare
from drumline.schedules import generate
from refused import refused, saying
from some import some

ALL_FORWARDS = generate("gpipe", num_ranks=2, num_microbatches=3)
BYTES = Limit(max_bytes=1)


@pytest.mark.parametrize("costs", [None, Costs(), Costs(weight_bytes=5), Costs(gradient_bytes=1, optimizer_bytes=2)])
def test_bytes_that_nobody_knows_are_not_proven_to_fit(costs: Costs | None) -> None:
    says = saying("max_bytes is 1, but the costs do not say how large activations are", expected="activation_bytes")
    with refused(CostsError, **says):
        validate(ALL_FORWARDS, limit=BYTES, costs=costs)
    with refused(CostsError, **says):
        simulate(ALL_FORWARDS, costs, limit=BYTES)
    with refused(CostsError, **says):
        compare(2, num_microbatches=3, costs=costs, limit=BYTES)
    with refused(CostsError, **says):
        search(costs or Costs(), Placement.linear(2), num_microbatches=3, limit=BYTES)
    assert validate(ALL_FORWARDS, limit=BYTES, costs=Costs(activation_bytes=0)) == []


@pytest.mark.parametrize("value", [math.nan, -math.nan, "4", "", True, [4], 1 + 2j])
@pytest.mark.parametrize("name", ["max_activations", "max_bytes"])
def test_a_limit_that_is_no_number_is_refused(name: str, value: Any) -> None:
    with refused(CostsError, rf"^{name} is "):
        Limit(**{name: value})


def test_a_cut_is_not_proven_to_fit_a_limit_that_is_no_number() -> None:
    alone = [HeldPairs(stages=(0,), moments=np.ones((1, 1, 3)))]
    with refused(CostsError, "max_bytes is nan"):
        partition([BlockCosts(1.0, activation_bytes=1)], 1, held_pairs=alone, max_bytes=math.nan)


@pytest.mark.parametrize(("size", "most"), [(0.1, 0.3), (0.7, 2.1), (1.1e9, 3.3e9), (1e-3, 3e-3), (1 / 3, 1.0)])
def test_three_pairs_fit_where_three_times_their_size_is_the_limit(size: float, most: float) -> None:
    costs, limit = Costs(activation_bytes=size), Limit(max_bytes=most)
    assert validate(ALL_FORWARDS, limit=limit, costs=costs) == []
    assert next(row for row in compare(2, num_microbatches=3, costs=costs, limit=limit) if row.name == "gpipe").fits
    instance = Instance(costs, Placement.linear(2), 3, limit)
    assert instance.rows_fit(ALL_FORWARDS)
    found = search(costs, Placement.linear(2), num_microbatches=3, limit=limit, tries=50)
    assert found.value == pytest.approx(search(Costs(), Placement.linear(2), num_microbatches=3, tries=50).value)


@pytest.mark.parametrize(("size", "most"), [(0.1, 0.2999999), (1.0, 2.999999999), (1e9, 3e9 - 1)])
def test_what_is_over_a_limit_by_more_than_rounding_is_over_it(size: float, most: float) -> None:
    costs, limit = Costs(activation_bytes=size), Limit(max_bytes=most)
    assert [violation.rank for violation in validate(ALL_FORWARDS, limit=limit, costs=costs)] == [0, 1]
    assert not Instance(costs, Placement.linear(2), 3, limit).rows_fit(ALL_FORWARDS)


@pytest.mark.slow
def test_sums_that_are_rounded_over_a_thousand_microbatches_still_fit() -> None:
    program = generate("1f1b", num_ranks=4, num_microbatches=1000)
    costs = Costs(activation_bytes=0.1, held_until_weight_bytes=0.03)
    assert validate(program, limit=Limit(max_bytes=0.4), costs=costs) == []
    assert len(validate(program, limit=Limit(max_bytes=0.4 - 1e-9), costs=costs)) == 1


def test_a_share_of_pairs_admits_the_whole_pairs_in_it() -> None:
    assert Limit(max_activations=0.29 * 100).admits_pairs(29)
    assert not Limit(max_activations=28.9).admits_pairs(29)
    assert Limit(max_activations=math.inf).admits_pairs(10**9)
    assert Limit().admits_pairs(10**9)
    assert Limit().admits_bytes(math.inf)


def test_a_third_of_a_rank_is_a_whole_pair_where_limits_are_drawn_over_memory() -> None:
    picture = pareto(
        Costs(), 2, num_microbatches=3, placement="loop", stages_per_rank=3, seconds=60, tries=4
    )  # limits in steps of a third
    limits = [point.limit for point in picture.searched]
    assert any(limit is not None and limit % 1 > 0 for limit in limits)
    for point in some(picture.searched):
        assert point.limit is not None
        assert point.memory <= point.limit + 1e-6


def test_waiting_is_not_put_down_to_memory_where_three_pairs_fit_after_all() -> None:
    program = generate("1f1b", num_ranks=2, num_microbatches=6)
    costs = Costs(activation_bytes=0.1)

    def memory(limit: Limit) -> int:
        return sum(idle.cause is Cause.MEMORY for idle in attribute(simulate(program, costs, limit=limit), limit))

    assert memory(Limit(max_bytes=0.2)) > 0
    assert memory(Limit(max_bytes=0.3)) == memory(Limit(max_bytes=0.30001)) == 0
