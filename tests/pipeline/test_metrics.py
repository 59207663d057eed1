"""What a step says of itself: tokens for each device, and whose work it waited for."""

from __future__ import annotations

import pytest

from drumline.core.measured.record import BETWEEN
from drumline.core.program import Program
from drumline.engine.ranks.tally import RankReport, Tally
from drumline.features.record.recording import Between
from drumline.runtime.draft import Clock, Draft
from records import two_ranks

pytestmark = [pytest.mark.torch, pytest.mark.features("record")]


def test_tokens_per_second_are_those_of_a_device() -> None:
    program = Program.parse("0F0,0B0\n1F0,1B0")
    told = [RankReport(record=record) for record in two_ranks()]
    told[0].num_rows, told[0].num_tokens = 8, 400
    line = Tally(0, lambda: told, program).metrics({})
    seconds = line["time_metrics/end_to_end(s)"]
    assert line["throughput(rows/s)"] == pytest.approx(8 / seconds)
    assert line["throughput(tps)"] == pytest.approx(400 / seconds / 2)


class Ticks(Clock):
    """Shows one nanosecond more whenever it is looked at."""

    def __init__(self) -> None:
        self.shown = 0

    def now(self) -> int:
        self.shown += 1
        return self.shown


def test_what_was_under_way_when_a_step_began_is_over_then() -> None:
    between, drafts = Between([Ticks()]), [Draft(0), Draft(0)]
    between.enter("update")
    between.hand_over(drafts[:1])  # a step inside of an optimizer's step
    between.leave()
    with between.during("clip"):
        pass
    between.hand_over(drafts[1:])
    kinds = [[BETWEEN[kind] for kind in draft.between[::3]] for draft in drafts]
    assert kinds == [["update"], ["clip"]]
