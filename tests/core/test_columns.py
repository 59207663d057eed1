"""Rows as arrays."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from drumline.core.action import TIMED_OPS, Action
from drumline.core.graph import OPS, Columns
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from programs import programs
from some import some


def spelled(columns: Columns) -> list[list[Action]]:
    """Put the arrays' plain actions back into rows."""
    rows: list[list[Action]] = [[] for _ in columns.lengths]
    entries = (columns.rank, columns.stage, columns.code, columns.microbatch)
    for rank, stage, code, microbatch in zip(*(column.tolist() for column in entries), strict=True):
        rows[rank].append(Action(stage, OPS[code], None if microbatch < 0 else microbatch))
    return rows


@given(programs())
def test_the_arrays_spell_the_rows(program: Program) -> None:
    assert spelled(program.columns) == [[part for action in row for part in action.work] for row in program.rows]


@given(programs())
def test_positions_point_at_the_actions(program: Program) -> None:
    columns = program.columns
    for rank, position, stage in some(zip(columns.rank, columns.position, columns.stage, strict=True)):
        assert stage in [part.stage for part in program.rows[rank][position].work]


@given(programs())
def test_the_timed_ones_are_the_columns_of_rows_without_the_others(program: Program) -> None:
    rows = [[action for action in row if action.op in TIMED_OPS] for row in program.rows]
    expected, found = Columns.of(rows), program.timed_columns
    assert found.lengths == expected.lengths
    for name in ("stage", "code", "microbatch", "rank", "cell", "paired", "position"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


@given(programs(), programs())
def test_a_program_of_arrays_is_the_program_of_its_rows(program: Program, other: Program) -> None:
    for rows in (program.rows, lower(program).rows):
        spelled_out, arrays = Program(rows), Program.of_columns(Columns.of(rows), "a name")
        assert (arrays == spelled_out, hash(arrays) == hash(spelled_out)) == (True, True)
        assert (arrays == Program.of_columns(Columns.of(other.rows))) == (rows == other.rows)
        assert (arrays.num_ranks, arrays.num_actions) == (len(rows), sum(map(len, rows)))
        assert "rows" not in vars(arrays)
        assert (arrays.rows, arrays.name) == (rows, "a name")
        assert pickle.loads(pickle.dumps(Program.of_columns(Columns.of(rows)))) == spelled_out
        assert replace(arrays, name="other").rows == rows


def test_programs_of_arrays_differ_where_one_action_does() -> None:
    texts = ("0F0,0B0", "1F0,0B0", "0F0,0I0", "0F1,0B0", "0F0\n0B0", "(0F0;0B0)OVERLAP_F_B")
    made = [Program.of_columns(Program.parse(text).columns) for text in texts]
    assert [[first == second for second in made] for first in made] == np.eye(len(texts), dtype=bool).tolist()
    assert made[0] != "0F0,0B0"
    with pytest.raises(AttributeError, match="no attribute 'columnz'"):
        _ = made[0].columnz


def test_the_halves_of_a_pair_share_a_cell() -> None:
    columns = Program.parse("0F0,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD").columns
    assert columns.cell.tolist() == [0, 1, 1, 2, 3]
    assert columns.heads.tolist() == [True, True, False, True, True]
    assert columns.timed.tolist() == [True, True, True, True, False]
