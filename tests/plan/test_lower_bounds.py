"""Lower bounds: no program goes below them, and the best ones often reach them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from drumline.core.costs import Costs
from drumline.core.placement import Placement
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds.instance import F, I, Instance, W
from drumline.plan.search.bounds.lower_bounds import BOUNDS, lower_bound, residence
from drumline.plan.search.objective import OBJECTIVES, Objective
from matrices import examples


@cache
def interleavings(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every order in which chains of these lengths can be merged, as the chain of each place."""
    if not any(lengths):
        return ((),)
    found = []
    for at, length in enumerate(lengths):
        if length:
            less = (*lengths[:at], length - 1, *lengths[at + 1 :])
            found += [(at, *rest) for rest in interleavings(less)]
    return tuple(found)


def orders(instance: Instance, rank: int) -> Iterator[list[int]]:
    """Every row of F, I and W of this rank that fits, microbatches in any order."""
    pairs = [(lane.stage, m) for lane in instance.lanes[rank] for m in lane.microbatches]
    for merged in interleavings((3,) * len(pairs)):
        done = [0] * len(pairs)
        row = []
        for at in merged:
            row.append(instance.number(*(pairs[at][0], (F, I, W)[done[at]], pairs[at][1])))
            done[at] += 1
        if instance.fits(row, rank):
            yield row


def brute_force(instance: Instance, objective: str) -> float:
    """The best of all programs, by trying every one of them."""
    rule = Objective(instance, objective)
    every = [list(orders(instance, rank)) for rank in range(instance.num_ranks)]
    values = (rule.measure(list(rows)) for rows in product(*every))
    return min(measured.value for measured in values if measured is not None)


def drawn(seed: int) -> Instance:
    """An instance small enough to try everything: two ranks, or three with one microbatch, or a V."""
    rng = random.Random(seed)
    placement, num_microbatches = rng.choice(
        [
            (Placement.linear(2), 2),
            (Placement.linear(2), 2),
            (Placement.linear(3), 2),
            (Placement.v(2), 1),
            (Placement.loop(2), 1),
        ]
    )
    stages = placement.num_stages

    def numbers(low: int, high: int) -> list[float]:
        return [float(rng.randint(low, high)) for _ in range(stages)]

    sizes = numbers(2, 6)
    alone = max(sum(sizes[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks))
    per_rank = stages // placement.num_ranks
    costs = Costs(
        forward=numbers(1, 9),
        backward_input=numbers(1, 9),
        backward_weight=numbers(1, 9),
        comm=rng.choice([0, 0, 2, 5]),
        microbatch_factor=[rng.choice([0.5, 1.0, 2.0]) for _ in range(num_microbatches)] if rng.random() < 0.5 else 1.0,
        activation_bytes=sizes,
        held_until_weight_bytes=[rng.choice([0.25, 0.5, 1.0]) * size for size in sizes],
    )
    limit = rng.choice(
        [Limit(), Limit(max_activations=rng.randint(per_rank, 3)), Limit(max_bytes=2 * alone * rng.uniform(1, 2))]
    )
    return Instance(costs, placement, num_microbatches, limit)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(examples(40)))
def test_no_bound_exceeds_the_best_of_all_programs(seed: int) -> None:
    instance = drawn(seed)
    for objective in OBJECTIVES:
        best = brute_force(instance, objective)
        for name, bound in BOUNDS.items():
            assert bound(instance, objective) <= best * (1 + 1e-12), (name, objective)


@pytest.mark.slow
def test_bounds_are_often_what_the_best_program_reaches() -> None:
    reached = [
        lower_bound(drawn(seed)).value == pytest.approx(brute_force(drawn(seed), "makespan")) for seed in range(40)
    ]
    assert sum(reached) >= 24


# Where the limit is what counts: all that each rank holds, it holds for as long as it must.
HELD = {
    "one pair at a time": (Costs(backward_weight=2, comm=8), Limit(max_activations=1), True),
    "one pair at a time, of unequal stages": (
        Costs(forward=[3, 1], backward_input=[2, 4], backward_weight=[5, 2], comm=3),
        Limit(max_activations=1),
        True,
    ),
    "one pair's bytes on the last rank alone": (
        Costs(backward_weight=[1, 4], activation_bytes=[1, 4]),
        Limit(max_bytes=4),
        True,
    ),
    "bytes that I frees for the next one": (
        Costs(backward_weight=3, activation_bytes=1, held_until_weight_bytes=0),
        Limit(max_bytes=1),
        False,
    ),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("costs", "limit", "is_reached"), HELD.values(), ids=HELD)
def test_residence_is_what_the_best_program_reaches_and_no_more(
    costs: Costs, limit: Limit, is_reached: bool, objective: str
) -> None:
    instance = Instance(costs, Placement.linear(2), 2, limit)
    best, bound = brute_force(instance, objective), residence(instance, objective)
    assert bound <= best
    assert (bound == pytest.approx(best, rel=1e-9)) is is_reached  # limits have that much room for rounding


def published(
    num_ranks: int, num_microbatches: int, f: float, i: float, w: float, c: float, pairs: float | None
) -> Instance:
    costs = Costs(forward=f, backward_input=i, backward_weight=w, comm=c)
    return Instance(costs, Placement.linear(num_ranks), num_microbatches, Limit(max_activations=pairs))


def test_one_stage_per_rank_reaches_the_known_formula() -> None:
    # span >= max{M(F+I+W), M(F+I) + (P-1)(F+I+2c) + W}
    instance = published(8, 24, 18.522, 18.086, 9.337, 0.601, None)
    by_hand = 24 * (18.522 + 18.086) + 7 * (18.522 + 18.086 + 2 * 0.601) + 9.337
    assert lower_bound(instance, "span").value == pytest.approx(by_hand)
    assert lower_bound(published(8, 64, 18.522, 18.086, 9.337, 0.601, None), "span").value == pytest.approx(64 * 45.945)


def test_a_limit_in_pairs_reaches_the_known_formula() -> None:
    # span >= (P-1)(F+I+2c) + M(F+I) + (M-k+1)W
    instance = published(8, 24, 29.718, 29.444, 19.927, 0.527, 16)
    by_hand = 7 * (29.718 + 29.444 + 2 * 0.527) + 24 * (29.718 + 29.444) + (24 - 16 + 1) * 19.927
    assert lower_bound(instance, "span").value >= by_hand * (1 - 1e-12)


def test_few_pairs_leave_the_first_rank_idle_before_its_first_backward() -> None:
    # bubble >= (P-1)(I+2c) + (P-k)F with k forwards before the first backward
    instance = published(8, 24, 3, 2, 1, 0.25, 5)
    assert lower_bound(instance).value >= 24 * 6 + 7 * 2.5 + 3 * 3


def test_one_pair_at_a_time_is_bounded_exactly() -> None:
    instance = published(3, 4, 1, 1, 1, 0.5, 1)
    best = Objective(instance).measure(instance.rows_of(instance.plain) or [])
    assert best is not None
    assert lower_bound(instance).value == pytest.approx(best.value)
