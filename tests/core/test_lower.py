"""Lowered programs: the same compute, and every message once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.action import TRANSFER_OPS
from drumline.core.errors import ProgramError
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.prove.index import Index
from drumline.core.prove.violation import InvalidProgram
from drumline.core.state_actions import with_state
from lowered_rows import lowered_rows
from matrices import examples
from programs import NAMES, build, programs
from reference import run_on_edge_channel
from refused import refused


@settings(max_examples=examples(60))
@given(programs(), st.integers(1, 4))
def test_what_is_lowered_is_the_same_compute_with_every_message_once(program: Program, ahead: int) -> None:
    lowered = lower(program, ahead=ahead)
    assert lowered.compute_only() == program
    transfers = [action for row in lowered.rows for action in row if action.op in TRANSFER_OPS]
    assert len(transfers) == len(set(transfers))


@settings(max_examples=examples(60))
@given(programs(), st.integers(1, 4), st.booleans())
def test_arrays_are_lowered_as_action_by_action(program: Program, ahead: int, has_state: bool) -> None:
    program = with_state(program) if has_state and not program.num_updates else program
    assert lower(program, ahead=ahead).rows == lowered_rows(Index(program, program.placement), ahead)


@pytest.mark.parametrize("name", NAMES)
def test_open_receives_are_bounded(name: str) -> None:
    program = build(name, 4, 8)
    if program.placement.name == "linear":
        assert run_on_edge_channel(lower(program, ahead=1)) == 1
    assert run_on_edge_channel(lower(program, ahead=2)) <= 8


def test_lowering_again_changes_nothing() -> None:
    lowered = lower(build("zb-v", 3, 4))
    assert lower(lowered) is lowered


def test_what_cannot_run_is_not_lowered() -> None:
    with pytest.raises(InvalidProgram):
        lower(Program.parse("0B0,0F0"))
    with refused(ProgramError, "ahead is 0"):
        lower(Program.parse("0F0,0B0"), ahead=0)
