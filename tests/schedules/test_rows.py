"""Schedules as their authors draw them."""

from __future__ import annotations

import pytest

from drumline.core.prove.validate import validate
from drumline.schedules import find, generate
from names import build


def row(name: str, rank: int, ranks: int, microbatches: int) -> str:
    """The rank's actions without their stage numbers."""
    actions = build(name, ranks, microbatches).rows[rank]
    return " ".join(f"{action.op.value}{action.microbatch}" for action in actions)


def test_1f1b() -> None:
    assert row("1f1b", 0, 4, 6) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    assert row("1f1b", 3, 4, 6) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"


def test_1f1b_with_fewer_microbatches_than_ranks() -> None:
    assert row("1f1b", 0, 4, 2) == "F0 F1 B0 B1"
    assert row("1f1b", 0, 4, 1) == "F0 B0"


def test_zb_h1_delays_w_by_the_rank() -> None:
    assert row("zb-h1", 0, 3, 4) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert row("zb-h1", 2, 3, 4) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_breadth_first_runs_all_microbatches_of_a_stage_before_the_next() -> None:
    actions = [str(action) for action in build("looped-bfs", 2, 2).rows[0]]
    assert actions == ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"]


def test_bidirectional_schedules_exchange_at_the_end() -> None:
    for name in ("chimera", "dualpipe"):
        for rank, actions in enumerate(build(name, 4, 8).rows):
            assert [str(action) for action in actions[-2:]] == [f"{s}REDUCE_GRAD" for s in sorted({rank, 3 - rank})]


def test_vertical_sync_updates_where_rank_0_does() -> None:
    program = generate("pipedream", num_ranks=2, num_microbatches=3, vertical_sync=True)
    assert program.format().splitlines() == [
        "0F0,0F1,0B0,0UPDATE0,0F2,0B1,0B2,0UPDATE1,0UPDATE2",
        "1F0,1B0,1F1,1B1,1UPDATE0,1F2,1B2,1UPDATE1,1UPDATE2",
    ]
    assert validate(generate("pipedream", num_ranks=5, num_microbatches=12, vertical_sync=True)) == []


def test_pipedream_updates_after_every_backward() -> None:
    assert row("pipedream", 0, 2, 3) == "F0 F1 B0 UPDATE0 F2 B1 UPDATE1 B2 UPDATE2"


def test_an_odd_number_of_microbatches_splits_into_two_directions() -> None:
    for name in ("chimera", "dualpipe"):
        assert build(name, 4, 5).placement.mirrored == {3, 4}


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_each_recipe_is_a_function_of_under_30_lines(name: str) -> None:
    import inspect

    assert len(inspect.getsource(find(name).recipe).splitlines()) < 30
