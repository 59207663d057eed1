"""Unequal microbatches overtake each other in a search, and whole backwards stand beside split ones."""

from __future__ import annotations

import random
from typing import Any

import pytest

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds.instance import B, Instance, Rows
from drumline.plan.search.construct import Builder
from drumline.plan.search.local import Annealer
from drumline.plan.search.objective import Objective
from drumline.plan.search.search import placement_named, search
from drumline.plan.search.starts import split, stretched
from drumline.plan.search.styles import WOVEN, Styles
from drumline.schedules import generate
from matrices import examples
from reference import reference_times


def unequal(seed: int) -> Instance:
    """Microbatches of different lengths on any placement, under limits in pairs or in bytes."""
    rng = random.Random(seed)
    name = rng.choice(["linear", "linear", "loop", "v", "bidirectional"])
    num_ranks, num_microbatches = rng.choice([2, 4] if name == "bidirectional" else [2, 3]), rng.randint(4, 7)
    placement = placement_named(name, num_ranks, num_microbatches)
    per_rank = placement.num_stages // num_ranks

    def per_stage(*choices: float) -> list[float]:
        return [rng.choice(choices) for _ in range(placement.num_stages)]

    costs: dict[str, Any] = {"forward": per_stage(1, 1, 2, 0.5), "backward_input": per_stage(1, 1.5)}
    if rng.random() < 0.3:
        costs["backward"] = per_stage(1.5, 2, 2.5)
    if rng.random() < 0.3:
        costs |= {"message_bytes": per_stage(1, 2), "bytes_per_second": 4.0, "comm": 0.25}
    if rng.random() < 0.5:
        limit = Limit(max_activations=2 * per_rank + rng.randint(0, 2))
    else:
        costs |= {"activation_bytes": 1.0, "held_until_weight_bytes": rng.choice([0.25, 1.0, 1.25])}
        limit = Limit(max_bytes=per_rank * 3.75 * rng.choice([1.0, 1.5, 2.0]))
    factors = [rng.choice([1, 1, 2, 3]) for _ in range(num_microbatches)]
    return Instance(Costs(**costs, microbatch_factor=factors), placement, num_microbatches, limit)


def peaks(program: Program, costs: Costs) -> tuple[int, float]:
    """Return the most pairs and the most bytes that any rank holds, counted action by action."""
    factors = costs.factors(program.num_microbatches)
    full = costs.activation_bytes or 0.0
    kept = full if costs.held_until_weight_bytes is None else costs.held_until_weight_bytes
    assert isinstance(full, float)
    assert isinstance(kept, float)
    most_pairs, most_bytes = 0, 0.0
    for row in program.rows:
        held: dict[tuple[int, int], float] = {}
        for action in (part for other in row if other.is_compute for part in other.work):
            pair, factor = (action.stage, action.microbatch or 0), factors[action.microbatch or 0]
            if action.op is Op.FORWARD:
                held[pair] = full * factor
            during = dict(held)
            if action.op is Op.BACKWARD_INPUT:
                during[pair], held[pair] = max(full, kept) * factor, kept * factor
            most_pairs, most_bytes = max(most_pairs, len(during)), max(most_bytes, sum(during.values()))
            if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                del held[pair]
    return most_pairs, most_bytes


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(examples(30)))
def test_a_search_with_unequal_microbatches_is_valid_within_its_limit_and_as_long_as_it_says(seed: int) -> None:
    item = unequal(seed)
    found = search(item.costs, item.placement, num_microbatches=item.num_microbatches, limit=item.limit, seconds=0.1)
    assert validate(found.program, placement=item.placement) == []
    pairs, size = peaks(found.program, item.costs)
    assert item.limit.max_activations is None or pairs <= item.limit.max_activations
    assert item.limit.max_bytes is None or size <= item.limit.max_bytes * (1 + 1e-12)
    ended = max(end for _, end in reference_times(found.program, item.costs).values())
    assert found.value == pytest.approx(ended)
    assert found.bound.value <= ended * (1 + 1e-12)


def overtaking(rows: Rows, instance: Instance) -> bool:
    firsts = [[n // 4 % instance.num_microbatches for n in row if n % 4 in (1, 3)] for row in rows]
    return any(row != sorted(row) for row in firsts)


@pytest.mark.slow
def test_weight_gradients_woven_into_an_order_follow_their_own_input_gradient() -> None:
    num_overtaking = 0
    for seed in range(24):
        instance = unequal(seed)
        objective = Objective(instance)
        start = instance.rows_of(instance.plain)
        assert start is not None
        _, rows = Annealer(objective, random.Random(seed)).run(start, num_steps=300, heat=0.05)
        num_overtaking += overtaking(rows, instance)
        for style in WOVEN:
            woven = Styles(instance, may_join=False).build(style, order=split(rows))
            if woven is not None:
                assert validate(instance.program(woven.rows), limit=instance.limit, costs=instance.costs) == []
    assert num_overtaking > 3


def test_an_order_that_overtakes_gets_its_weight_gradients_in_the_order_of_their_input_gradients() -> None:
    instance = Instance(Costs(microbatch_factor=[2, 1]), placement_named("linear", 1, 2), 2)
    order = instance.rows_of(Program.parse("0F0,0F1,0I1,0I0,0W0,0W1"))
    built = Builder(instance).build(Styles(instance, may_join=False).policies(WOVEN[0]), order)
    assert built is not None
    assert instance.program(built.rows).format() == "0F0,0F1,0I1,0I0,0W1,0W0"


def partly_split(rows: Rows, rng: random.Random) -> Rows:
    """Return the rows with some of their whole backwards split, each W somewhere behind its I, in order."""
    made = []
    for row in rows:
        found: list[int] = []
        owed: list[int] = []
        for number in row:
            if number % 4 == B and rng.random() < 0.5:
                found.append(number - 2)
                owed.append(number - 1)
            else:
                found.append(number)
            while owed and rng.random() < 0.4:
                found.append(owed.pop(0))
        made.append(found + owed)
    return made


def test_what_is_stretched_has_every_action_once_also_where_whole_backwards_stand_beside_split_ones() -> None:
    few, more = (Instance(Costs(), placement_named("linear", 2, count), count) for count in (6, 9))
    text = "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0F4,0B3,0F5,0B4,0B5\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1F4,1B4,1F5,1B5"
    whole = few.rows_of(Program.parse(text))
    assert whole is not None
    split = [partly_split(whole, random.Random(seed)) for seed in range(40)]
    found = [longer for rows in split for longer in stretched(few, rows, more)]
    assert len(found) > 20
    for longer in found:
        reasons = [violation.reason for violation in validate(more.program(longer))]
        # Ranks that repeat different moments may wait for each other: timing finds that, and drops them.
        assert [reason for reason in reasons if "wait for each other" not in reason] == []


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_rows_whose_sends_hold_their_ranks_are_worth_what_the_simulator_says(objective: str) -> None:
    costs = Costs(message_bytes=2, bytes_per_second=1, overlap=False, reduce=[0, 3, 1, 0])
    program = generate("chimera", num_ranks=4, num_microbatches=4)
    instance = Instance(costs, program.placement, 4)
    rows = instance.rows_of(program)
    assert rows is not None
    measured, timeline = Objective(instance, objective).measure(rows), simulate(program, costs)
    assert measured is not None
    assert measured.value == (timeline.makespan if objective == "makespan" else timeline.span)
