"""The validator: legal schedules pass, and each kind of violation is named."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.action import COMPUTE_OPS, SEND_OPS, TRANSFER_OPS, Action, Op
from drumline.core.costs import Costs
from drumline.core.lower.lower import lower
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.validate import surely_runs, validate
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from kernel_cases import using
from matrices import ALL, FEW, examples
from programs import NAMES, admissible, build, programs
from reference import run_on_edge_channel

Rows = list[list[Action]]


def reasons(text: str) -> list[str]:
    return [str(violation) for violation in validate(Program.parse(text))]


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_legal_on_small_counts(name: str) -> None:
    for counts in admissible(name, *((3, 6, 2) if FEW else (5, 8, 3))):
        program = build(name, *counts)
        assert validate(program) == [], (name, counts)
        assert validate(lower(program)) == [], (name, counts)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_legal_for_every_admissible_count(name: str) -> None:
    # `make matrices` proves all; else of more than 5 ranks every fourth number, of more than 8 microbatches a fifth.
    for ranks, microbatches, stages in admissible(name, 12, 24, 4):
        if ALL or ((ranks <= 5 or ranks % 4 == 0) and (microbatches <= 8 or microbatches % 5 == 0)):
            assert validate(build(name, ranks, microbatches, stages)) == [], (name, ranks, microbatches, stages)


@settings(max_examples=examples(60))
@given(programs())
def test_a_proven_program_runs_on_the_strictest_channel(program: Program) -> None:
    lowered = lower(program)
    assert validate(lowered) == []
    run_on_edge_channel(lowered)


def test_a_stage_on_the_wrong_rank() -> None:
    text = "0F0,0F1,0B0,1B1,0B1\n1F0,1B0,1F1"
    assert "rank 0, position 3: 1B1 is on the wrong rank: stage 1 belongs to rank 1" in reasons(text)


def test_a_stated_placement_is_held_against_the_program() -> None:
    program = build("zb-v", 2, 2)
    assert validate(program, placement=Placement.v(2)) == []
    wrong = validate(program, placement=Placement.loop(2))
    assert {violation.action.stage for violation in wrong if violation.action} == {2, 3}


def test_missing_work() -> None:
    assert reasons("0F0,0F1,0B0,0B1\n1F0,1B0,1F1") == ["rank 1: 1B1 is missing, and so are 1I1 and 1W1"]
    text = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W1"
    assert reasons(text) == ["rank 1: 1W0 is missing, though 1I0 is there"]


def test_work_done_twice() -> None:
    found = reasons("0F0,0B0,0B0\n1F0,1B0")
    assert found == ["rank 0, position 2: 0B0 runs again; it first ran on rank 0 at position 1"]


def test_a_backward_both_whole_and_split() -> None:
    assert any("does the whole backward" in reason for reason in reasons("0F0,0B0,0I0,0W0\n1F0,1B0"))


def test_work_before_its_input() -> None:
    assert reasons("0B0,0F0\n1F0,1B0") == ["rank 0, position 0: 0B0 runs before 0F0"]
    assert reasons("0F0,0W0,0I0\n1F0,1I0,1W0") == ["rank 0, position 1: 0W0 runs before 0I0"]


def test_an_overlapped_pair_whose_halves_need_each_other() -> None:
    assert any("runs in one overlapped pair with 0F0" in reason for reason in reasons("(0F0;0B0)OVERLAP_F_B"))


def test_an_overlapped_pair_is_one_forward_and_one_backward() -> None:
    assert any(
        "must overlap one forward and one whole backward" in reason
        for reason in reasons("(0F0;0F1)OVERLAP_F_B,0B0,0B1")
    )


def test_ranks_that_wait_for_each_other_are_named_link_by_link() -> None:
    text = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"
    assert reasons(text) == [
        "rank 0, position 1: 0B0 never runs, ranks wait for each other: "
        "rank 0 at 0B0 (position 1) waits for 1B0 of rank 1 (position 2); "
        "rank 1 at 1F1 (position 1) waits for 0F1 of rank 0 (position 2)"
    ]


def test_sends_and_receives_in_different_orders() -> None:
    program = lower(build("gpipe", 2, 2))
    rows = [list(row) for row in program.rows]
    at = [index for index, action in enumerate(rows[1]) if action.op is Op.RECV_F]
    rows[1][at[0]], rows[1][at[1]] = rows[1][at[1]], rows[1][at[0]]
    found = [str(violation) for violation in validate(Program.of(rows))]
    assert any("the orders differ" in reason for reason in found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0SEND_F0 is missing"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0", "1RECV_F0 is missing"),
        ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0SEND_F0 is posted before 0F0"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0", "1RECV_F0 is posted after 1F0"),
        ("0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0SEND_F0 is posted again"),
        ("0F0,0SEND_F0,0RECV_B0,0B0,1RECV_F0\n1F0,1B0,1SEND_B0", "1RECV_F0 is on the wrong rank"),
        ("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0", "0SEND_F0 is not needed"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0,1SEND_F0", "carries data that no action uses"),
    ],
)
def test_messages_that_do_not_fit(text: str, says: str) -> None:
    assert any(says in reason for reason in reasons(text)), reasons(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0UNSHARD,0F0,0RESHARD,0B0", "0B0 runs while stage 0 is not gathered"),
        ("0RESHARD,0F0,0B0", "releases parameters that were not gathered"),
        ("0F0,0REDUCE_GRAD,0B0", "runs before 0B0, whose gradients it exchanges"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "exchanges the same gradients again"),
        ("0F0,0UPDATE0,0B0", "0UPDATE0 runs before 0B0"),
        ("0F0,0B0,0UPDATE0,0F1,0B1", "0UPDATE1 is missing: no optimizer step uses these gradients"),
        ("0F0,0B0,0F1,0B1,0UPDATE1,0UPDATE0", "comes after 0UPDATE1"),
    ],
)
def test_parameters_and_gradients_that_do_not_fit(text: str, says: str) -> None:
    assert any(says in reason for reason in reasons(text)), reasons(text)


def test_two_copies_must_exchange_their_gradients_in_one_order() -> None:
    program = build("chimera", 2, 2)
    rows = [list(row) for row in program.rows]
    exchanges = [action for action in rows[0] if action.op is Op.REDUCE_GRAD]
    without = [[action for action in row if action.op is not Op.REDUCE_GRAD] for row in rows]
    missing = validate(Program.of(without))
    assert len(missing) == 4
    assert all("copies on two ranks" in violation.reason for violation in missing)
    swapped = [without[0] + exchanges, without[1] + exchanges[::-1]]
    assert any("their orders differ" in violation.reason for violation in validate(Program.of(swapped)))


TWO_STEPS = "0F0,0B0,0REDUCE_GRAD,0UPDATE0,0F1,0B1,0REDUCE_GRAD,0UPDATE1"
BOTH_WAYS = (
    "0F0,1F1,1B1,0B0,0REDUCE_GRAD,1REDUCE_GRAD,0UPDATE1,1UPDATE1\n"
    "0F1,1F0,1B0,0B1,0REDUCE_GRAD,1REDUCE_GRAD,0UPDATE1,1UPDATE1"
)


def test_gradients_are_exchanged_once_per_step_and_before_its_update() -> None:
    assert reasons(TWO_STEPS) == []
    assert reasons(BOTH_WAYS) == []
    early = TWO_STEPS.replace("0REDUCE_GRAD,0UPDATE0", "0UPDATE0,0REDUCE_GRAD")
    assert reasons(early) == ["rank 0, position 2: 0UPDATE0 runs before 0REDUCE_GRAD has exchanged its gradients"]
    once = TWO_STEPS.replace("0REDUCE_GRAD,0UPDATE0", "0UPDATE0")
    assert any("exchanges gradients in its other steps" in reason for reason in reasons(once))


def test_two_copies_take_the_same_steps() -> None:
    text = BOTH_WAYS.replace("0UPDATE1,1UPDATE1\n", "0UPDATE0,0UPDATE1,1UPDATE1\n")
    assert any("the copies of stage 0 take different steps" in reason for reason in reasons(text))


def test_a_stage_in_the_middle_whose_copies_share_a_rank_needs_no_exchange() -> None:
    text = "0F0,2F1,2B1,0B0,0REDUCE_GRAD,2REDUCE_GRAD\n1F0,1F1,1B1,1B0\n2F0,0F1,2B0,0B1,0REDUCE_GRAD,2REDUCE_GRAD"
    assert [reason for reason in reasons(text) if "1REDUCE_GRAD" in reason] == []


def test_an_update_waits_for_the_other_copys_exchange() -> None:
    crossed = (
        "0F0,1F1,1B1,0B0,0REDUCE_GRAD,0UPDATE1,1REDUCE_GRAD,1UPDATE1\n"
        "0F1,1F0,1B0,0B1,1REDUCE_GRAD,1UPDATE1,0REDUCE_GRAD,0UPDATE1"
    )
    assert any("ranks wait for each other" in reason for reason in reasons(crossed))


@pytest.mark.parametrize("half", ["W0", "I1"])
def test_only_a_whole_backward_overlaps_a_forward(half: str) -> None:
    text = f"0F0,0F1,0I0,(0F2;0{half})OVERLAP_F_B"
    assert any("one forward and one whole backward" in reason for reason in reasons(text))


def test_a_stash_over_the_limit() -> None:
    program = build("gpipe", 2, 4)
    assert validate(program, limit=Limit(max_activations=4)) == []
    found = validate(program, limit=Limit(max_activations=3))
    assert [str(violation) for violation in found] == [
        "rank 0, position 3: 0F3 makes the rank hold 4 pairs, over the limit of 3",
        "rank 1, position 3: 1F3 makes the rank hold 4 pairs, over the limit of 3",
    ]
    costs = Costs(activation_bytes=10)
    assert validate(program, limit=Limit(max_bytes=40), costs=costs) == []
    assert len(validate(program, limit=Limit(max_bytes=39), costs=costs)) == 2


def test_numbers_far_apart_are_a_violation_and_not_a_loop() -> None:
    assert "of 1000000000 microbatches appear" in reasons("0F0,0B0,0F999999999,0B999999999")[0]
    assert "of 1000000000 stages appear" in reasons("0F0,0B0,999999999F0,999999999B0")[0]


def test_all_violations_are_returned() -> None:
    found = reasons("0B0,0F0,0F1,0B1,0B1\n1F0,1B0")
    assert any("runs before" in reason for reason in found)
    assert any("runs again" in reason for reason in found)
    assert any("1F1 is missing" in reason for reason in found)


# Each kind of damage, done at a random place of a random legal program. None: nothing to damage there.


def _drop(rows: Rows, rng: random.Random) -> str | None:
    # With a single microbatch a stage without its backward, or without W, may as well be frozen.
    several = any(part.microbatch for row in rows for action in row for part in action.work)
    rank, index = _somewhere(
        rows,
        rng,
        lambda action: action.op is Op.FORWARD or (several and (action.op is not Op.REDUCE_GRAD or len(rows) > 1)),
    )
    action = rows[rank].pop(index)
    if action.op is Op.REDUCE_GRAD:
        return None
    if action.op is Op.UPDATE:
        # Without an update that no other stage has, the next one counts its microbatches, too.
        updates = [other.microbatch or 0 for row in rows for other in row if other.op is Op.UPDATE]
        return "missing" if action.microbatch in updates or max(updates, default=0) < (action.microbatch or 0) else None
    return "missing"


def _double(rows: Rows, rng: random.Random) -> str | None:
    rank, index = _somewhere(rows, rng, lambda action: action.op in COMPUTE_OPS)
    rows[rank].insert(rng.randrange(index + 1, len(rows[rank]) + 1), rows[rank][index])
    return "again"


def _misplace(rows: Rows, rng: random.Random) -> str | None:
    if len(rows) == 1:
        return None
    rank, index = _somewhere(rows, rng, lambda action: action.op in COMPUTE_OPS)
    other = rng.choice([row for row in range(len(rows)) if row != rank])
    rows[other].insert(rng.randrange(len(rows[other]) + 1), rows[rank].pop(index))
    return "rank"


def _backward_first(rows: Rows, rng: random.Random) -> str | None:
    rank, index = _somewhere(rows, rng, lambda action: action.op in (Op.BACKWARD, Op.BACKWARD_INPUT))
    if index < 0:
        return None
    backward = rows[rank].pop(index)
    forward = next(
        at for at, row in enumerate(rows[rank]) for part in row.work if part == backward._replace(op=Op.FORWARD)
    )
    rows[rank].insert(forward, backward)
    return "before"


def _weight_first(rows: Rows, rng: random.Random) -> str | None:
    rank, index = _somewhere(rows, rng, lambda action: action.op is Op.BACKWARD_WEIGHT)
    if index < 0:
        return None
    weight = rows[rank].pop(index)
    rows[rank].insert(rows[rank].index(weight._replace(op=Op.BACKWARD_INPUT)), weight)
    return "before"


def _somewhere(rows: Rows, rng: random.Random, wanted: Callable[[Action], bool]) -> tuple[int, int]:
    places = [(r, i) for r, row in enumerate(rows) for i, action in enumerate(row) if wanted(action)]
    return rng.choice(places) if places else (0, -1)


@settings(max_examples=examples(150))
@given(
    programs(),
    st.sampled_from([_drop, _double, _misplace, _backward_first, _weight_first]),
    st.randoms(use_true_random=False),
)
def test_each_kind_of_damage_is_caught(
    program: Program, damage: Callable[[Rows, random.Random], str | None], rng: random.Random
) -> None:
    rows = [list(row) for row in program.rows]
    kind = damage(rows, rng)
    if kind is None or not all(rows):
        return
    found = [str(violation) for violation in validate(Program.of(rows))]
    assert any(kind in reason for reason in found), (kind, found)


@settings(max_examples=examples(100))
@given(programs(max_ranks=4, max_microbatches=5), st.randoms(use_true_random=False))
def test_damaged_messages_are_caught(program: Program, rng: random.Random) -> None:
    rows = [list(row) for row in lower(program).rows]
    places = [(r, i) for r, row in enumerate(rows) for i, action in enumerate(row) if action.op in TRANSFER_OPS]
    if not places:
        return
    rank, index = rng.choice(places)
    damage = rng.choice(["drop", "double", "move"])
    action = rows[rank].pop(index)
    if damage == "double":
        rows[rank] += [action, action]
    elif damage == "move":
        rows[rank].insert(0 if action.op in SEND_OPS else len(rows[rank]), action)
    assert validate(Program.of(rows)) != []


@settings(max_examples=examples(150))
@given(programs(max_ranks=4, max_microbatches=4), st.randoms(use_true_random=False), st.integers(0, 3))
def test_what_compiles_no_check_refuses(program: Program, rng: random.Random, swaps: int) -> None:
    """Without a kernel; and all plain computing that the checks admit compiles."""
    rows = [list(row) for row in program.rows]
    for _ in range(swaps):
        row = rng.choice(rows)
        first, second = rng.randrange(len(row)), rng.randrange(len(row))
        row[first], row[second] = row[second], row[first]
    damaged = Program.of(rows)
    with using(None), pytest.MonkeyPatch.context() as patch:
        proven = surely_runs(damaged)
        patch.setattr("drumline.core.prove.validate.surely_runs", lambda *_: False)
        violations = validate(damaged)
    plain = damaged.columns.ops <= COMPUTE_OPS and damaged.agreed_placement and not damaged.placement.mirrored
    assert proven == bool(plain and not violations)
    assert bool(validate(damaged)) == bool(violations)


def test_a_stage_below_zero_is_refused() -> None:
    with pytest.raises(InvalidProgram):
        simulate(Program.of([[Action(-1, Op.FORWARD, 0), Action(0, Op.FORWARD, 0)]]))


@settings(max_examples=examples(150))
@given(programs(max_ranks=4, max_microbatches=4), st.randoms(use_true_random=False))
def test_a_shuffled_program_is_legal_exactly_if_it_can_be_run(program: Program, rng: random.Random) -> None:
    """Swap neighbours at random: the validator and the strictest channel must agree on the result."""
    rows = [[action for action in row if action.is_compute] for row in program.rows]
    for _ in range(rng.randrange(1, 6)):
        rank = rng.randrange(len(rows))
        if len(rows[rank]) > 1:
            at = rng.randrange(len(rows[rank]) - 1)
            rows[rank][at], rows[rank][at + 1] = rows[rank][at + 1], rows[rank][at]
    shuffled = Program.of(rows)
    found = validate(shuffled)
    legal = [v for v in found if v.action is None or v.action.op not in (Op.REDUCE_GRAD, Op.UPDATE)] == []
    assert legal == _runs(shuffled)
    _simulates_exactly_if_valid(shuffled)


def _simulates_exactly_if_valid(program: Program) -> None:
    if validate(program):
        with pytest.raises(InvalidProgram):
            simulate(program)
    else:
        assert simulate(program).makespan > 0


@settings(max_examples=examples(200))
@given(
    programs(max_ranks=4, max_microbatches=4),
    st.sampled_from([_drop, _double, _misplace, _backward_first, _weight_first]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_what_the_validator_refuses_is_not_simulated(
    program: Program, damage: Callable[[Rows, random.Random], str | None], spelled: bool, rng: random.Random
) -> None:
    rows = [list(row) for row in (lower(program) if spelled else program).rows]
    damage(rows, rng)
    if all(rows):
        _simulates_exactly_if_valid(Program.of(rows))


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,0B0",
        "0F0,0B0,0I0,0W0",
        "0F0,(0F1;1F0)OVERLAP_F_B,1B0,0B0,1F1,1B1,0B1",
        "0F0,0F1,1F1,0B0,1B1,0B1\n1F0,1B0",
        "0F0,0B0,0UPDATE0,0REDUCE_GRAD",
        "0UNSHARD,0F0,0RESHARD,0B0",
        "0F0,0B0,0W0",
    ],
)
def test_each_of_these_is_refused_by_both(text: str) -> None:
    _simulates_exactly_if_valid(Program.parse(text))
    assert reasons(text)


def _runs(program: Program) -> bool:
    """Whether the rows run through when any input counts as sent the moment it is made."""
    done: set[Action] = set()
    at = [0] * program.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if not all(_inputs_done(part, program.num_stages, done) for part in action.work):
                    break
                done.update(action.work)
                at[rank] += 1
                moved = True
    return all(at[rank] == len(row) for rank, row in enumerate(program.rows))


def _inputs_done(part: Action, num_stages: int, done: set[Action]) -> bool:
    s, m = part.stage, part.microbatch
    if part.op is Op.FORWARD:
        return s == 0 or Action(s - 1, Op.FORWARD, m) in done
    if part.op is Op.BACKWARD_WEIGHT:
        return Action(s, Op.BACKWARD_INPUT, m) in done
    behind = {Action(s + 1, Op.BACKWARD, m), Action(s + 1, Op.BACKWARD_INPUT, m)}
    return Action(s, Op.FORWARD, m) in done and (s == num_stages - 1 or bool(behind & done))
