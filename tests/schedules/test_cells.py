"""Rows as arrays: what recipes make of them is what they would write down action by action."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

import pytest

from drumline.core.action import Action, B, F, I, Op, W
from drumline.core.errors import ScheduleError
from drumline.core.program import Program
from drumline.schedules import generate, schedule, unregister
from drumline.schedules.cells import Lanes, Turns, cells, joined, run
from drumline.schedules.orders import delayed_weights, visits
from matrices import ALL
from refused import refused


def test_a_row_of_arrays_is_looked_at_as_actions() -> None:
    row = joined([run(Op.FORWARD, 3, 2), run(Op.BACKWARD, 1, 3)])
    assert list(row) == [F(3, 0), F(3, 1), B(1, 0), B(1, 1), B(1, 2)]
    assert (len(row), list(row[1:3])) == (5, [F(3, 1), B(1, 0)])
    assert all(type(action) is Action and type(action.stage) is int for action in row)


def test_patterns_take_microbatches_in_order_and_none_for_no_turn() -> None:
    down, up = (0, Op.FORWARD), (1, Op.FORWARD)
    row = Turns().add(1, down).add(2, up, down).add(0, up).add(-3, down).add(1, up, (0, Op.BACKWARD))
    assert list(map(str, row)) == ["0F0", "1F0", "0F1", "1F1", "0F2", "1F2", "0B0"]


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
@pytest.mark.parametrize("delay", [0, 2, 8])
def test_forwards_run_ahead_and_weights_behind(count: int, ahead: int, delay: int) -> None:
    forwards, backwards, weights = ([op(2, m) for m in range(count)] for op in (F, I, W))
    turns = zip_longest(forwards[ahead:], backwards, [*[None] * delay, *weights])
    expected = forwards[:ahead] + [action for turn in turns for action in turn if action is not None]
    assert list(delayed_weights(2, count, ahead=ahead, delay=delay)) == expected
    lanes = [run(op, 0, count) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    assert list(Lanes(*lanes).row(ahead=ahead, delay=delay, down=2)) == expected
    halves = Lanes(*lanes[:2]).row(ahead=ahead, down=2)
    assert list(halves) == [action for action in expected if action.op is not Op.BACKWARD_WEIGHT]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [*range(1, 12)] if ALL else [1, 4, 7, 11])
def test_groups_visit_one_local_stage_after_the_other(num_ranks: int, num_microbatches: int) -> None:
    local, microbatches = visits(num_ranks, num_microbatches, 3)
    seen = list(zip(local.tolist(), microbatches.tolist(), strict=True))
    assert sorted(seen) == [(stage, m) for stage in range(3) for m in range(num_microbatches)]
    first = {m: seen.index((0, m)) for m in range(num_microbatches)}
    for stage in range(3):
        assert [m for at, m in seen if at == stage] == list(range(num_microbatches))
    # A group is the run of microbatches before the next local stage begins; it has P or a few more, if there are P.
    size = next((at for at, (stage, _) in enumerate(seen) if stage == 1), len(seen))
    assert first[0] == 0
    assert size >= min(num_ranks, num_microbatches)
    assert size < 2 * num_ranks


def test_a_recipe_may_mix_rows_of_arrays_and_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    @schedule("mixed", summary="half of it by hand")
    def mixed(num_ranks: int, *, num_microbatches: int) -> Iterator[Iterable[Action]]:
        yield joined(run(op, 0, num_microbatches) for op in (Op.FORWARD, Op.BACKWARD))
        yield [op(1, m) for m in range(num_microbatches) for op in (F, B)]
        lanes = Lanes(run(Op.FORWARD, 2, num_microbatches), run(Op.BACKWARD, 2, num_microbatches))
        yield lanes.row(ahead=1)
        yield lanes.row(ahead=0, down=1)

    @schedule("large", summary="more than there may be")
    def large(num_ranks: int, *, num_microbatches: int) -> Iterator[Iterable[Action]]:
        yield cells(Op.FORWARD, *(run(Op.FORWARD, 0, 9).microbatch,) * 2)

    try:
        program = generate("mixed", num_ranks=4, num_microbatches=2)
        assert program == Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n3F0,3B0,3F1,3B1")
        monkeypatch.setattr("drumline.schedules.registry.MAX_ACTIONS", 8)
        monkeypatch.setattr("drumline.schedules.registry.MAX_IN_ARRAYS", 8)
        with refused(ScheduleError, "yields more than 8 actions"):
            generate("large", num_ranks=1, num_microbatches=1)
    finally:
        unregister("mixed")
        unregister("large")
