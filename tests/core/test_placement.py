"""Placements: which rank runs which stage, as stated and as read from the rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.graph import Columns
from drumline.core.placement import Placement, consistent, infer
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from programs import NAMES, build, programs

EXPECTED = {
    "interleaved-1f1b": "loop",
    "looped-bfs": "loop",
    "interleaved-zb": "loop",
    "zb-v": "v",
    "v-half": "v",
    "v-min": "v",
    "hanayo": "v",
    "dualpipe-v": "v",
    "dualpipe": "bidirectional",
    "chimera": "bidirectional",
}


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_its_placement(name: str) -> None:
    assert build(name, 4, 8).placement.name == EXPECTED.get(name, "linear")


@given(programs())
def test_work_that_agrees_needs_no_votes(program: Program) -> None:
    agreed = consistent(program.columns)
    assert agreed is not None
    one_for_all = [[*row, *row] for row in program.rows]
    assert consistent(Columns.of(one_for_all)) == agreed


@given(programs(max_ranks=4, max_microbatches=4), st.data())
def test_work_agrees_exactly_if_the_validator_finds_none_misplaced(program: Program, data: st.DataObject) -> None:
    if program.num_ranks == 1:
        return
    rows = [list(row) for row in program.rows]
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    index = data.draw(st.integers(0, len(rows[rank]) - 1))
    other = data.draw(st.sampled_from([r for r in range(program.num_ranks) if r != rank]))
    rows[other].append(rows[rank].pop(index))
    if not all(rows):
        return
    misplaced = [violation for violation in validate(Program.of(rows)) if "is on the wrong rank" in violation.reason]
    assert (consistent(Columns.of(rows)) is None) == bool(misplaced)


def test_interleaving_gives_rank_0_the_blocks_0_and_P() -> None:
    assert Placement.loop(4, stages_per_rank=2).stages_of(0) == (0, 4)


def test_a_bidirectional_placement_holds_every_stage_twice() -> None:
    placement = Placement.bidirectional(4, mirrored=[2, 3])
    assert placement.rank_of(0, 0) == 0
    assert placement.rank_of(0, 2) == 3
    assert placement.ranks_of(1) == (1, 2)
    assert placement.stages_of(0) == (0, 3)


@given(programs(max_ranks=4), st.data())
def test_one_stray_action_does_not_move_its_stage(program: Program, data: st.DataObject) -> None:
    if program.num_ranks == 1 or program.num_microbatches < 4 or (program.placement.mirrored and program.num_ranks < 4):
        return  # too few witnesses
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    index = data.draw(st.integers(0, len(program.rows[rank]) - 1))
    other = data.draw(st.sampled_from([r for r in range(program.num_ranks) if r != rank]))
    rows = [list(row) for row in program.rows]
    rows[other].append(rows[rank].pop(index))
    if not rows[rank]:
        return
    assert infer(rows) == program.placement
