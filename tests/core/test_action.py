"""Actions and their text form: what parses, what is written, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.action import COMPUTE_OPS, STATE_OPS, WAIT_OPS, Action, Op, overlap
from drumline.core.errors import ProgramError
from drumline.core.program import Program
from refused import refused

UNNUMBERED = STATE_OPS | {Op.WAIT_REDUCE_GRAD}
plain = st.builds(
    Action,
    st.integers(0, 999),
    st.sampled_from([op for op in Op if op not in UNNUMBERED and op is not Op.OVERLAP]),
    st.integers(0, 9999),
    st.just(()),
)
state = st.builds(Action, st.integers(0, 999), st.sampled_from(sorted(UNNUMBERED)), st.none(), st.just(()))
compute = plain.filter(lambda action: action.op in COMPUTE_OPS)
actions = plain | state | st.builds(overlap, compute, compute)


@given(actions)
def test_parsing_what_was_formatted_gives_the_same_action(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.lists(st.lists(actions, min_size=1, max_size=6), min_size=1, max_size=4))
def test_rows_of_any_actions_survive_their_text_form(rows: list[list[Action]]) -> None:
    program = Program.of(rows)
    assert Program.parse(program.format()) == program
    assert Program.parse(program.format()).format() == program.format()


def test_the_words_of_torch_2_15_are_read_and_written() -> None:
    text = "2WAIT_SEND_F0,3WAIT_SEND_B12,2WAIT_REDUCE_GRAD"
    (row,) = Program.parse(text).rows
    assert {action.op for action in row} == WAIT_OPS
    assert [action.microbatch for action in row] == [0, 12, None]
    assert ",".join(map(str, row)) == text


@given(st.text(alphabet="0123456789FBIWSENDRCV_();UPATOGH ", max_size=14))
def test_whatever_parses_is_spelled_exactly_that_way(text: str) -> None:
    try:
        action = Action.parse(text)
    except ProgramError:
        return
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2F",
        "2F0junk",
        "2f0",
        "-1F0",
        "02F0",
        "2F00",
        " 2F0",
        "2X0",
        "2UNSHARD3",
        "2UPDATE",
        "2SEND_F",
        "2WAIT_SEND_F",
        "2WAIT_REDUCE_GRAD0",
        "2WAIT_RECV_F0",
        "2WAIT0",
        "²F0",
        "٣F0",
    ]
    + [
        "(0F5;1B2)",
        "(0F5)OVERLAP_F_B",
        "(0F5;1B2;2F0)OVERLAP_F_B",
        "(0F5;1SEND_F2)OVERLAP_F_B",
        "0OVERLAP_F_B1",
        "9999999999F0",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ProgramError):
        Action.parse(text)


def test_a_long_cell_is_shown_shortened() -> None:
    with pytest.raises(ProgramError) as caught:
        Action.parse("9" * 10_000)
    assert len(str(caught.value)) < 200


def test_an_unknown_op_suggests_the_nearest() -> None:
    with refused(ProgramError, "unknown op 'RECW_F'", fix="did you mean RECV_F"):
        Action.parse("2RECW_F0")


def test_work_of_a_pair_is_its_two_halves() -> None:
    pair = Action.parse("(0F5;1B2)OVERLAP_F_B")
    assert [str(part) for part in pair.work] == ["0F5", "1B2"]
    assert pair.is_compute
    assert not Action.parse("2SEND_F0").is_compute
