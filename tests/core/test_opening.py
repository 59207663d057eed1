"""The opening of a step can be run and taken back: it makes no gradient and leaves no message under way."""

from __future__ import annotations

import pytest

from drumline.core.action import RECV_OPS, Op
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.prove.opening import openings
from drumline.schedules import generate
from names import NAMES, admissible, build
from some import some


def computed(name: str, *, num_ranks: int, num_microbatches: int) -> list[str]:
    program = lower(generate(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
    return [" ".join(str(action) for action in opening if action.is_compute) for opening, _ in openings(program)]


def test_openings_are_the_forwards_before_the_first_backward_as_far_as_others_use_them() -> None:
    assert computed("1f1b", num_ranks=4, num_microbatches=8) == ["0F0 0F1 0F2 0F3", "1F0 1F1 1F2", "2F0 2F1", "3F0"]
    assert computed("zb-h2", num_ranks=3, num_microbatches=6) == ["0F0 0F1 0F2", "1F0 1F1", "2F0"]
    assert computed("gpipe", num_ranks=2, num_microbatches=3) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]
    assert computed("zb-v", num_ranks=2, num_microbatches=4) == ["0F0 0F1", "1F0 2F0"]


@pytest.mark.parametrize("name", NAMES)
def test_an_opening_can_be_taken_back(name: str) -> None:
    for counts in some(admissible(name, 4, 5, 2)):
        program = lower(build(name, *counts))
        parts = openings(program)
        for row, (opening, rest) in zip(program.rows, parts, strict=True):
            assert sorted(map(str, (*opening, *rest))) == sorted(map(str, row))
            assert {action.op for action in opening} <= {Op.FORWARD, Op.SEND_F, Op.RECV_F}
            order = [action for action in row if action.op not in RECV_OPS]
            assert [action for action in (*opening, *rest) if action.op not in RECV_OPS] == order
        sent = [(item.stage + 1, item.microbatch) for opening, _ in parts for item in opening if item.op is Op.SEND_F]
        posted = [(other.stage, other.microbatch) for opening, _ in parts for other in opening if other.op is Op.RECV_F]
        assert sorted(sent) == sorted(posted)
        assert posts(Program.of([[*opening, *rest] for opening, rest in parts])) == posts(program)


def posts(program: Program) -> dict[tuple[int, int], list[str]]:
    """Return the receives of every directed edge in the order in which they are posted."""
    found: dict[tuple[int, int], list[str]] = {}
    for rank, row in enumerate(program.rows):
        for action in row:
            if action.op in RECV_OPS:
                assert action.microbatch is not None
                stage = action.stage - 1 if action.op is Op.RECV_F else action.stage + 1
                found.setdefault((program.placement.rank_of(stage, action.microbatch), rank), []).append(str(action))
    return found
