"""Slices of sequences as text, as a rule, in seconds and in bytes, each against a form that shares no code with it."""

from __future__ import annotations

import pickle
import random
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.action import Action, Op, SliceNumber
from drumline.core.costs import Costs
from drumline.core.errors import ProgramError
from drumline.core.kernel.text import read
from drumline.core.lower.lower import lower
from drumline.core.lower.torch_text import for_torch
from drumline.core.program import _SPELLING, MAX_IN_ARRAYS, Program
from drumline.core.prove.frozen import prune
from drumline.core.prove.slices import in_order
from drumline.core.prove.validate import validate
from drumline.core.prove.whole import join
from drumline.core.simulate.simulate import makespans, simulate
from drumline.core.simulate.steps import in_groups, several_steps
from drumline.core.state_actions import with_state
from drumline.schedules import generate
from kernel_cases import using
from kernels import compiled
from matrices import examples
from refused import refused
from some import some
from text_cases import compare_texts, edited

FORMS = ("kernel", "python")


def form(name: str) -> AbstractContextManager[None]:
    return using(compiled() if name == "kernel" else None)


def sliced(name: str = "1f1b", ranks: int = 3, count: int = 2, slices: int = 3) -> Program:
    return generate(name, num_ranks=ranks, num_microbatches=count, slices=slices)


# ---- text --------------------------------------------------------------------------------------------------------

EVERY_OP = "\n".join(
    [
        "0UNSHARD,0F0.0,0SEND_F0.0,0F0.1,0SEND_F0.1,0WAIT_SEND_F0.0,0RECV_B0.1,0I0.1,0W0.1,0B0.0,0UPDATE0.1",
        "1RECV_F0.0,1F0.0,(1F0.1;1B0.1)OVERLAP_F_B,1SEND_B0.1,1B0.0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD",
    ]
)


@pytest.mark.parametrize("use", FORMS)
@pytest.mark.parametrize("text", [EVERY_OP, "0F0.0,0F0.1,0F0.2\n1F0.0,1F0.1,1F0.2", "0F1.1,,0F1.0\n1F0.0,1F0.1"])
def test_text_with_slices_is_written_as_it_was_read(use: str, text: str) -> None:
    with form(use):
        program = Program.parse(text)
        assert program.format() == text.replace(",,", ",")
        again = Program(program.rows, num_slices=program.num_slices)
        assert again.format() == program.format()
        assert again == program == Program.of_columns(program.columns)
        assert hash(again) == hash(program)


@pytest.mark.parametrize("use", FORMS)
def test_numbers_count_slices_through_all_microbatches(use: str) -> None:
    with form(use):
        program = Program.parse("0F0.0,0F0.1,0F0.2,0F1.0,0F1.1,0F1.2")
    assert [int(action.microbatch or 0) for action in program.rows[0]] == list(range(6))
    assert (program.num_microbatches, program.num_slices, program.num_units) == (2, 3, 6)
    assert "num_microbatches=2, num_slices=3" in repr(program)
    assert Program.parse("0F0,0F1").num_units == 2


def test_the_same_numbers_in_other_slices_are_other_programs() -> None:
    rows = [[Action(0, Op.FORWARD, number) for number in range(4)]]
    programs = [Program.of(rows, num_slices=count) for count in (1, 2, 4)]
    assert len({*programs, *map(Program.of_columns, (program.columns for program in programs))}) == 3
    for program, other in pairwise(programs):
        assert program != other
        assert Program.of_columns(program.columns) != other
    assert [str(program) for program in programs] == [
        "0F0,0F1,0F2,0F3",
        "0F0.0,0F0.1,0F1.0,0F1.1",
        "0F0.0,0F0.1,0F0.2,0F0.3",
    ]
    with refused(ProgramError, "num_slices is 0"):
        Program.of(rows, num_slices=0)


def test_actions_of_slices_travel_between_processes() -> None:
    program = sliced()
    assert str(pickle.loads(pickle.dumps(program))) == str(program)
    assert str(pickle.loads(pickle.dumps(program.rows[0][1]))) == "0F0.1"
    assert str(replace(program, name="other").rows[0][1]) == "0F0.1"


BAD = {
    "0F0.0,0F0.1,0F1": "'0F1' names no slice",
    "0F1,0F0.0,0F0.1": "'0F1' names no slice",
    "0F0.0,0B0.0": "names slice 0, and microbatches have one slice",
    "0F0.0,0F0.2": "microbatch 0 has no slice 1, though an action names slice 2",
    "0F0.0,0F0.1,0F1.1": "microbatch 1 has no slice 0, though an action names slice 1",
    "0F0.0,0F0.1,0F0.2,0F1.0,0F1.1": "microbatch 1 has no slice 2",
    "0F0.0,0F0.01": "'0F0.01' is not an action",
    "0F0.0,0F0.1,0F0.": "'0F0.' is not an action",
    "0F0.0,0F0.1,0F.1": "'0F.1' is not an action",
    "0F0.0,0F0.1.1": "'0F0.1.1' is not an action",
    "0F0.0,0F0.1,0UNSHARD.1": "'0UNSHARD.1' is not an action",
    "0F999999999.999999999,0F0.0": "microbatch 0 has no slice 1",
}


@pytest.mark.parametrize("use", FORMS)
@pytest.mark.parametrize("text", BAD)
def test_slices_that_do_not_fit_are_refused(use: str, text: str) -> None:
    with form(use), refused(ProgramError, re.escape(BAD[text])):
        Program.parse(text)


def test_the_kernel_reads_slices_itself() -> None:
    with using(compiled()):
        cells = read("0F1.1,0F1.0,0F0.0,0F0.1", _SPELLING, MAX_IN_ARRAYS)
    assert cells is not None
    assert not isinstance(cells, int)
    assert (cells.num_slices, cells.numbers[2].tolist()) == (2, [3, 2, 0, 1])


@settings(max_examples=examples(60))
@given(st.sampled_from(("1f1b", "zb-h1", "looped-bfs")), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_both_readers_agree_on_damaged_texts(name: str, slices: int, seed: int) -> None:
    rng, kernel = random.Random(seed), compiled()
    text = str(lower(sliced(name, 2, 2, slices)))
    assert compare_texts(kernel, text)
    for _ in range(3):
        compare_texts(kernel, edited(text, rng))


CHANGES: dict[str, Callable[[Program], Program]] = {
    "lowered": lower,
    "lowered for one queue": lambda program: lower(program, channel="rank"),
    "without messages": lambda program: lower(program).compute_only(),
    "with state": with_state,
    "joined": lambda program: join(program, [True] * program.num_stages),
    "pruned": lambda program: prune(program, [False, *[True] * (program.num_stages - 1)]),
    "several steps": lambda program: several_steps(program, 2),
    "in groups": lambda program: in_groups(program, 2),
    "rearranged": lambda program: program.rearranged(program.rows),
    "timed": lambda program: Program.of_columns(lower(program).timed_columns),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_program_keep_its_slices(name: str) -> None:
    before = sliced("zb-h1")
    after = CHANGES[name](before)
    assert after.num_slices == 3
    assert Program.parse(str(after)) == after
    assert not validate(after)


def test_files_for_pytorch_refuse_slices() -> None:
    for communication in (False, True):
        with refused(ProgramError, "runs microbatches in slices", fix="run slices with Drumline"):
            for_torch(sliced(), communication=communication)


# ---- the rule ----------------------------------------------------------------------------------------------------

_WORD = re.compile(r"(\d+)([FBIW])(\d+)(?:\.(\d+))?")
Word = tuple[int, str, int, int]


def words(program: Program) -> list[list[Word]]:
    """Return stage, op, microbatch and slice of every action, from the text alone."""
    rows = [re.findall(_WORD, line) for line in str(program).splitlines()]
    return [[(int(stage), op, int(m), int(part or 0)) for stage, op, m, part in row] for row in rows]


def needed(word: Word, last_stage: int, slices: int) -> list[list[Word]]:
    """Return what must have run before an action: one of each list."""
    stage, op, m, part = word
    match op:
        case "F":
            before: list[list[Word]] = [[(stage - 1, "F", m, part)]] if stage else []
            return [*before, [(stage, "F", m, part - 1)]] if part else before
        case "W":
            return [[(stage, "I", m, part)]]
    after: list[list[Word]] = [[(stage, "F", m, part)]]
    if stage < last_stage:
        after.append([(stage + 1, "B", m, part), (stage + 1, "I", m, part)])
    if part < slices - 1:
        after.append([(stage, "B", m, part + 1), (stage, "I", m, part + 1)])
    return after


def runs(program: Program) -> bool:
    """Whether ranks that run their rows in order get to their ends."""
    rows, happened = words(program), set[Word]()
    last, at = max(word[0] for row in rows for word in row), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(
                happened.intersection(ways) for ways in needed(row[at[rank]], last, program.num_slices)
            ):
                happened.add(row[at[rank]])
                at[rank] += 1
                moved = True
    return at == [len(row) for row in rows]


def shuffled(program: Program, rng: random.Random) -> Program:
    """Return the program with a few neighbours in a row swapped."""
    rows = [list(row) for row in program.rows]
    for _ in range(rng.randint(0, 2)):
        row = rng.choice(rows)
        at = rng.randrange(len(row) - 1)
        row[at : at + 2] = row[at + 1], row[at]
    return program.rearranged(rows)


@settings(max_examples=examples(150))
@given(st.sampled_from(("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")), st.integers(1, 3), st.integers(2, 4),
       st.integers(0, 2**32 - 1))  # fmt: skip
def test_a_program_is_legal_if_its_slices_can_run_in_order(name: str, ranks: int, slices: int, seed: int) -> None:
    program = shuffled(sliced(name, ranks, 2, slices), random.Random(seed))
    legal = runs(program)
    for use in FORMS:
        fresh = Program.of_columns(program.columns)
        with form(use):
            assert (validate(fresh) == []) == legal, str(program)
            if legal:
                assert in_order(fresh)
                assert simulate(fresh).makespan > 0
            else:
                with refused(ProgramError, "cannot run"):
                    simulate(fresh)


RULES = {
    "0F0.1,0F0.0,0B0.1,0B0.0": [
        "rank 0, position 0: 0F0.1 runs before 0F0.0: slices of a microbatch go forward in order"],
    "0F0.0,0F0.1,0I0.0,0I0.1,0W0.0,0W0.1": [
        "rank 0, position 2: 0I0.0 runs before 0I0.1: slices of a microbatch go backward in reverse"],
    "0F0.0,0B0.1,0F0.1,0B0.0": ["rank 0, position 1: 0B0.1 runs before 0F0.1"],
    "0F0.0,0F0.1,0B0.1": ["rank 0: 0B0.0 is missing, and so are 0I0.0 and 0W0.0"],
}  # fmt: skip


@pytest.mark.parametrize("text", RULES)
def test_broken_rules_name_slices(text: str) -> None:
    assert [str(violation) for violation in validate(Program.parse(text))] == RULES[text]


@pytest.mark.parametrize("use", FORMS)
def test_two_copies_of_a_stage_share_no_microbatch_in_slices(use: str) -> None:
    whole = Program.parse("0F0,1F1\n0F1,1F0")
    with form(use):
        assert validate(whole) == []
        for order in (whole.rows, whole.rows[::-1]):
            assert any("is on another rank than" in violation.reason for violation in validate(Program(order, "", 2)))


def test_slices_of_one_microbatch_are_on_one_rank() -> None:
    apart = Program.parse("0F0.0,0B0.0\n0F0.1,0B0.1")
    found = [str(violation) for violation in validate(apart)]
    assert (
        "rank 1, position 0: 0F0.1 is on another rank than 0F0.0: slices of a microbatch share keys and values" in found
    )


def test_a_program_without_all_slices_is_refused_by_name() -> None:
    row = [Action(0, Op.FORWARD, number) for number in (0, 1, 2)]
    (violation,) = validate(Program.of([row], num_slices=2))
    assert str(violation) == "no rank runs slice 1.1, though the program has a slice 1.0: 3 of 4 slices appear"


def test_deadlocks_name_slices() -> None:
    early = Program.parse(
        "0F0.0,0F0.1,0B0.1,0B0.0,0F1.0,0F1.1,0B1.1,0B1.0\n1F0.0,1F0.1,1F1.0,1B0.1,1B0.0,1F1.1,1B1.1,1B1.0"
    )
    assert any("waits" in str(violation) and ".1" in str(violation) for violation in validate(early))


# ---- seconds and bytes -------------------------------------------------------------------------------------------

LENGTHS = (5, 4, 2, 1)
SECONDS = {"F": 1.5, "I": 2.0, "W": 1.0, "B": 3.0}


def slice_seconds(attention: float) -> dict[tuple[str, int], float]:
    """Return what each op takes on each slice, counting the keys that its tokens see."""
    total, ends = sum(LENGTHS), [0, *accumulate(LENGTHS)]
    seconds: dict[tuple[str, int], float] = {}
    for part, (start, end) in enumerate(pairwise(ends)):
        keys = sum(2 * token + 1 for token in range(start, end)) / total**2
        tokens = (end - start) / total
        share = (1 - attention) * tokens + attention * keys
        seconds |= {("F", part): SECONDS["F"] * share, ("B", part): SECONDS["B"] * share}
        rest = min(SECONDS["W"], SECONDS["I"] * (1 - attention) / attention) if attention else 0.0
        seconds["W", part] = SECONDS["W"] * share + rest * (tokens - share)
        seconds["I", part] = SECONDS["B"] * share - seconds["W", part]
    return seconds


def brute_ends(program: Program, attention: float, comm: float = 0.0) -> dict[Word, float]:
    """Return when every action ends: as soon as what it needs allows."""
    rows, seconds, ends = words(program), slice_seconds(attention), dict[Word, float]()
    home = {word: rank for rank, row in enumerate(rows) for word in row}
    last, at, free = max(word[0] for word in home), [0] * len(rows), [0.0] * len(rows)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                word = row[at[rank]]
                inputs = [[other for other in ways if other in ends] for ways in needed(word, last, program.num_slices)]
                if not all(inputs):
                    break
                ready = [ends[ways[0]] + comm * (home[ways[0]] != rank) for ways in inputs]
                free[rank] = ends[word] = max([free[rank], *ready]) + seconds[word[1], word[3]]
                at[rank] += 1
    return ends


@pytest.mark.parametrize("use", FORMS)
@pytest.mark.parametrize("attention", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_slices_take_their_tokens_and_the_keys_they_see(use: str, attention: float, name: str) -> None:
    costs = Costs(
        forward=1.5, backward_input=2, backward_weight=1, comm=0.25, attention=attention, slice_lengths=LENGTHS
    )
    with form(use):
        program = sliced(name, 3, 2, 4)
        wanted = max(brute_ends(program, attention, 0.25).values())
        assert simulate(program, costs).makespan == pytest.approx(wanted, rel=1e-12)
        assert makespans(program, [costs, costs])[1] == pytest.approx(wanted, rel=1e-12)


def test_slices_of_a_microbatch_take_what_it_takes_in_one_piece() -> None:
    for name in ("1f1b", "zb-h1"):
        costs = Costs(1.5, 2, 1, attention=0.4, slice_lengths=LENGTHS, microbatch_factor=[1.0, 3.0])
        whole = simulate(generate(name, num_ranks=2, num_microbatches=2), replace(costs, slice_lengths=1.0))
        parts = simulate(sliced(name, 2, 2, 4), costs)
        assert parts.busy == pytest.approx(whole.busy, rel=1e-12)


def test_measured_seconds_of_slices_count_as_they_are() -> None:
    costs = Costs(forward=2, backward=4, slice_factor=[0.25, 0.5, 0.5], attention=0.9)
    program = Program.parse("0F0.0,0F0.1,0F0.2,0B0.2,0B0.1,0B0.0")
    track = simulate(program, costs).tracks[0]
    assert [end - start for start, end in zip(track.starts, track.ends, strict=True)] == [0.5, 1.0, 1.0, 2.0, 2.0, 1.0]


@pytest.mark.parametrize("use", FORMS)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_each_stage_may_have_parts_of_its_own(use: str, name: str) -> None:
    counts = len(LENGTHS)
    with form(use):
        program = sliced(name, 3, 2, counts)
        stages = range(program.num_stages)
        parts = [[1.0 / (stage + 2) + number / 7 for number in range(counts)] for stage in stages]
        forward, factor = [1.5 + stage for stage in stages], [1.0, 3.0]
        costs = Costs(forward, backward_weight=0.7, microbatch_factor=factor, slice_factor=parts, comm=0.25)
        timeline = simulate(program, costs)
        for track in timeline.tracks:
            for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
                whole, number = divmod(int(action.microbatch or 0), counts)
                each = {"F": 1.5 + action.stage, "I": 1.0, "W": 0.7, "B": 1.7}[action.op.value]
                assert end - start == pytest.approx(each * parts[action.stage][number] * [1.0, 3.0][whole], rel=1e-12)
        assert makespans(program, [costs, replace(costs, slice_factor=None)])[0] == timeline.makespan
        alike = replace(costs, slice_factor=[parts[0]] * program.num_stages)
        assert simulate(program, alike).makespan == simulate(program, replace(costs, slice_factor=parts[0])).makespan


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_both_forms_time_stages_with_parts_of_their_own_bit_for_bit(name: str) -> None:
    program = sliced(name, 3, 2, len(LENGTHS))
    parts = [[1.0 / (stage + 3 + number) for number in range(len(LENGTHS))] for stage in range(program.num_stages)]
    ends = []
    for use in FORMS:
        with form(use):
            timeline = simulate(sliced(name, 3, 2, len(LENGTHS)), Costs(1.1, 2.3, 0.9, slice_factor=parts))
        ends.append([list(track.ends) for track in timeline.tracks])
    assert len(ends) > 1
    assert ends == [ends[0]] * len(ends)


def brute_bytes(program: Program, activation: float, until_weight: float, keys: float, checkpoint: float | None) -> (
    list[list[tuple[float, float]]]
):  # fmt: skip
    """Return what every rank holds during and after each action, with a ledger of what is held."""
    total, count = sum(LENGTHS), len(LENGTHS)
    rows = []
    for row in words(program):
        held, sizes = defaultdict[tuple[str, int, int, int], float](float), []
        for stage, op, m, part in row:
            share, pair = LENGTHS[part] / total, ("pair", stage, m, part)
            first = checkpoint + keys if checkpoint is not None else activation
            if op == "F":
                held[pair] = first * share
            if op in "BI":
                held[pair] = activation * share
                if part == count - 1:
                    held["gradients", stage, m, 0] = keys
            during = sum(held.values())
            if op == "I":
                held[pair] = until_weight * share
            if op in "BW":
                del held[pair]
            if op in "BI" and part == 0:
                del held["gradients", stage, m, 0]
            sizes.append((during, sum(held.values())))
        rows.append(sizes)
    return rows


@pytest.mark.parametrize("checkpoint", [None, 1.5])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
def test_ranks_hold_slices_and_the_gradients_of_keys_and_values(name: str, checkpoint: float | None) -> None:
    program = sliced(name, 3, 3, 4)
    costs = Costs(activation_bytes=10, held_until_weight_bytes=7, key_value_bytes=2, slice_lengths=LENGTHS,
                  recompute=checkpoint is not None, checkpoint_bytes=checkpoint or 0.0)  # fmt: skip
    timelines = []
    for use in FORMS:
        with form(use):
            timelines.append([holding.bytes for holding in simulate(program, costs).memory])
    assert timelines[0] == timelines[1]
    for found, wanted in zip(timelines[0], brute_bytes(program, 10, 7, 2, checkpoint), strict=True):
        assert found is not None
        for pair, other in some(list(zip(found, wanted, strict=True))):
            assert pair == pytest.approx(other, abs=1e-9)
    assert simulate(program, costs).peak_bytes == pytest.approx(
        tuple(max(during for during, _ in rank) for rank in brute_bytes(program, 10, 7, 2, checkpoint)), abs=1e-9
    )


def test_messages_of_slices_have_their_bytes() -> None:
    program = sliced("1f1b", 2, 1, 4)
    costs = Costs(message_bytes=12, bytes_per_second=100, slice_lengths=LENGTHS)
    sizes = {str(transfer.action): transfer.num_bytes for transfer in simulate(program, costs).transfers}
    assert [sizes[f"0SEND_F0.{part}"] for part in range(4)] == list(LENGTHS)


def test_spans_transfers_and_causes_name_slices() -> None:
    timeline = simulate(sliced("1f1b", 2, 1, 2), Costs(comm=0.5))
    named = [span.action for span in timeline.spans()] + [span.action for span in timeline.critical_path]
    named += [transfer.action for transfer in timeline.transfers] + [
        idle.before for idle in timeline.causes if idle.before
    ]
    assert len(named) > 12
    assert all(re.fullmatch(r"[01](SEND_)?[FB]0\.[01]", str(action)) for action in named)
    assert all(isinstance(action.microbatch, SliceNumber) for action in named)
