"""What equal stages and whole numbers do not show: rounding, directions, copies, orders, shares."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from chains import rank_bytes
from cluster_models import small_cluster, small_transformer
from drumline.core.costs import Costs, Edge
from drumline.core.errors import PlanError
from drumline.core.placement import Placement
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.layout import Layout, Practice
from drumline.plan.cluster.stages import slices_of
from drumline.plan.cluster.transformer import Experts, model_flops
from drumline.plan.cut.chain import BlockCosts
from drumline.plan.cut.partition import partition
from drumline.plan.cut.peaks import HeldPairs
from drumline.plan.device.blocks import Profile, Times
from drumline.plan.device.combinations import reordered
from drumline.plan.device.planner import _chosen
from drumline.plan.search.bounds.lower_bounds import BOUNDS, lower_bound
from drumline.plan.search.instance import B, I, Instance
from drumline.plan.search.local import Neighbourhood
from drumline.plan.search.objective import Jitter, Objective
from names import build
from profiles import layer
from some import some

TWO = Placement.linear(2)
BOTH_WAYS = Placement.bidirectional(2, mirrored=[1])


# ---- bounds and search -----------------------------------------------------------------------------------------------


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


# ---- cuts and plans --------------------------------------------------------------------------------------------------


def test_a_tied_weight_counts_once_in_a_stage_and_on_a_rank() -> None:
    tied = BlockCosts(1.0, static_bytes=100, tied=(("table", 90.0),))
    blocks = [tied, BlockCosts(1.0, static_bytes=10), tied]
    one_rank = HeldPairs(stages=(0, 1), moments=np.zeros((1, 2, 3)))
    assert rank_bytes(blocks, [2, 1], [one_rank]) == (210 - 90,)
    alone = [HeldPairs(stages=(stage,), moments=np.zeros((1, 1, 3))) for stage in (0, 1)]
    assert rank_bytes(blocks, [2, 1], alone) == (110, 100)
    assert partition(blocks, 1, held=[HeldPairs((0,), np.zeros((1, 1, 3)))], max_bytes=120).counts == (3,)
    with pytest.raises(PlanError, match="max_bytes=120 or more"):
        partition(blocks, 1, held=[HeldPairs((0,), np.zeros((1, 1, 3)))], max_bytes=119)
    # Within 110 bytes only a cut that leaves the table once on either side fits.
    found = partition(blocks, 2, held=alone, max_bytes=110)
    assert found.rank_bytes in ((110, 100), (100, 110))


def test_what_a_stage_received_is_held_with_every_pair() -> None:
    blocks = [BlockCosts(1.0, activation_bytes=10, start_bytes=start) for start in (0, 7, 3)]
    held = [HeldPairs(stages=(stage,), moments=np.array([[[2.0, 0.0, 0.0]]])) for stage in (0, 1)]
    assert rank_bytes(blocks, [1, 2], held) == (2 * 10, 2 * (20 + 7))
    assert rank_bytes(blocks, [2, 1], held) == (2 * 20, 2 * (10 + 3))


def test_of_equal_largest_stages_the_evenest_cut_is_taken() -> None:
    blocks = [BlockCosts(seconds) for seconds in (6, 1, 1, 1, 1, 1, 1)]
    assert partition(blocks, 3).counts == (1, 3, 3)


def test_of_two_copies_the_one_with_more_microbatches_decides() -> None:
    # Three of four microbatches go down: rank 0 runs most of stage 0, rank 1 most of stage 1.
    held = [
        HeldPairs(stages=(0, 1), moments=np.zeros((1, 2, 3)), shares=(0.75, 0.25)),
        HeldPairs(stages=(0, 1), moments=np.zeros((1, 2, 3)), shares=(0.25, 0.75)),
    ]
    blocks = [BlockCosts(seconds) for seconds in (4, 1, 1, 1, 1)]
    found = partition(blocks, 2, held=held)
    assert found.is_exact
    best = min(max(0.75 * left + 0.25 * (8 - left), 0.25 * left + 0.75 * (8 - left)) for left in (4.0, 5.0, 6.0, 7.0))
    left, right = found.seconds
    assert max(0.75 * left + 0.25 * right, 0.25 * left + 0.75 * right) == best


def test_a_tied_weight_is_free_only_on_ranks_that_hold_it_already() -> None:
    first, last = (replace(layer(name, 1.0), tied=(("table", 40, 40),)) for name in "ac")
    profile = Profile((first, layer("b", 1.0), last), Times(0.0, 0.0, 0.0, 0.0), "cpu", 1)
    weights = [
        profile.costs((1, 1, 1), placement=place).per_stage("weight_bytes", 3) for place in (Placement.linear(3),)
    ]
    assert weights == [(50, 50, 50)]
    shared = Placement(2, (0, 1, 0))  # stages 0 and 2 are one rank's
    assert profile.costs((1, 1, 1), placement=shared).per_stage("weight_bytes", 3) == (50, 50, 10)
    assert profile.costs((1, 1, 1), placement=shared).per_stage("gradient_bytes", 3) == (50, 50, 10)


def test_ranks_play_the_parts_that_an_order_gives_them() -> None:
    program = build("1f1b", 3, 4)
    order = (1, 2, 0)
    found = reordered(program, order)
    assert all(found.rows[rank] == program.rows[part] for part, rank in enumerate(order))
    assert found.placement.homes == order


def candidate(seconds: float, peak: float, sent: float, *, searched: bool = False) -> Any:
    return SimpleNamespace(step_seconds=seconds, peak=peak, sent_bytes=sent, searched=searched)


def test_of_equal_plans_bytes_come_before_names_and_names_before_seconds() -> None:
    few, named = candidate(1.001, 10, 5, searched=True), candidate(1.0, 10, 6)
    assert _chosen(cast(Any, [few, named])) is few
    slower, found = candidate(1.002, 10, 5), candidate(1.0, 10, 5, searched=True)
    assert _chosen(cast(Any, [found, slower])) is slower
    light, heavy = candidate(1.005, 10, 9), candidate(1.0, 11, 1)
    assert _chosen(cast(Any, [heavy, light])) is light
    assert _chosen(cast(Any, [candidate(1.02, 1, 1), heavy])) is heavy


# ---- clusters --------------------------------------------------------------------------------------------------------

PLAIN = Practice(overlap_data=False)


def sizes(zero: int) -> tuple[float, float, float]:
    found = estimate(small_transformer(), small_cluster(4), Layout(batch=8, data=4, zero=zero)).bytes
    return found.weights, found.gradients, found.optimizer


def test_each_level_of_zero_shards_one_thing_more() -> None:
    weights, gradients, optimizer = sizes(0)
    assert sizes(1) == (weights, gradients, optimizer / 4)
    assert sizes(2) == (weights, gradients / 4, optimizer / 4)
    assert sizes(3) == (weights / 4, gradients / 4, optimizer / 4)


def test_sharded_weights_are_gathered_for_the_forward_and_again_for_the_backward() -> None:
    def sent(zero: int, batch: int) -> float:
        layout = Layout(batch=batch, data=4, zero=zero, practice=Practice(gradient_bytes=2))
        return estimate(small_transformer(), small_cluster(4), layout).volumes.data

    # Two bytes of gradient out and two of weight back: with ZeRO 1 once a step, with ZeRO 3 one and two a microbatch.
    assert sent(3, 4) == pytest.approx(1.5 * sent(1, 4))
    assert sent(3, 8) == pytest.approx(3.0 * sent(1, 8))


def test_experts_that_every_token_visits_are_counted() -> None:
    def flops(per_token: int, shared: int) -> float:
        experts = Experts(num_experts=8, per_token=per_token, feedforward=2048, num_shared=shared)
        return model_flops(small_transformer(experts=experts), 1)

    assert flops(2, 1) == flops(3, 0)
    assert flops(2, 1) > flops(2, 0)


def test_a_tied_embedding_is_exchanged_between_the_ends_of_a_pipeline() -> None:
    layout = Layout(batch=8, pipeline=4, practice=PLAIN)
    apart, tied = (
        estimate(small_transformer(tied=one), small_cluster(4), layout).seconds.data_exposed for one in (False, True)
    )
    assert tied > apart


def test_only_the_first_layers_are_dense() -> None:
    model = small_transformer(experts=Experts(8, 2, 2048), num_dense_layers=4)
    found = slices_of(model, (3, 3, 3, 3))
    assert [(one.dense, one.experts) for one in some(found)] == [(3, 0), (1, 2), (0, 3), (0, 3)]
