"""Programs with two copies of a stage, and with several updates: what is legal, and what counts as a message."""

from __future__ import annotations

from dataclasses import replace

from drumline.core.action import Action, B, F, Op
from drumline.core.graph import Columns
from drumline.core.measured.measured import Measured
from drumline.core.measured.metrics import step_metrics
from drumline.core.measured.record import RECEIVES
from drumline.core.placement import Placement, consistent
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from names import build
from records import PROGRAM, two_ranks


def test_the_way_of_most_microbatches_is_called_down() -> None:
    rows: list[list[Action]] = [[], []]
    for microbatch, way in enumerate(((0, 1), (1, 0), (1, 0))):
        for op, stages in ((F, (0, 1)), (B, (1, 0))):
            for stage in stages:
                rows[way[stage]].append(op(stage, microbatch))
    assert consistent(Columns.of(rows)) == Placement(2, (1, 0), frozenset({0}))
    assert Program.of(rows).placement == Placement(2, (1, 0), frozenset({0}))


def test_every_steps_exchange_comes_behind_its_own_backwards() -> None:
    legal = "0F0,0B0,0REDUCE_GRAD,0UPDATE0,0F1,0B1,0REDUCE_GRAD,0UPDATE1"
    assert validate(Program.parse(legal)) == []
    early = legal.replace("0B1,0REDUCE_GRAD", "0REDUCE_GRAD,0B1")
    (found,) = validate(Program.parse(early))
    assert str(found).endswith("0REDUCE_GRAD runs before 0B1, whose gradients it exchanges")


def test_copies_that_step_after_other_microbatches_are_refused() -> None:
    rows = [list(row) for row in build("chimera", 2, 4).rows]
    for rank, last in ((0, 3), (1, 2)):
        rows[rank] += [Action(stage, Op.UPDATE, last) for stage in (0, 1)]
    told = "the copies of stage 0 take different steps: rank 0 after microbatches [3], rank 1 after microbatches [2]"
    assert told in [violation.reason for violation in validate(Program.of(rows))]


def test_an_update_takes_the_microbatch_that_it_is_named_by() -> None:
    assert validate(Program.parse("0F0,0F1,0B0,0B1,0UPDATE1")) == []
    found = [str(violation) for violation in validate(Program.parse("0F0,0F1,0B0,0UPDATE1,0B1"))]
    assert found == ["rank 0, position 3: 0UPDATE1 runs before 0B1"]


def test_exchanged_gradients_are_no_messages_in_a_queue() -> None:
    first, second = two_ranks()
    at = first.begin_ns
    exchanged = [2, 0, RECEIVES.index(Op.REDUCE_GRAD), -1, 1, at + 200, at + 201, at + 452, at + 452, at + 453, 64]
    timeline = Measured(PROGRAM, (replace(first, messages=[*first.messages, *exchanged]), second))
    metrics = step_metrics(PROGRAM, timeline.records)
    assert metrics["pp/edge1-0/peak_queue"] == 1
    assert metrics["pp/edge0-1/peak_queue"] == 1
