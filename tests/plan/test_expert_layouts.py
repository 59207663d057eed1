"""Layouts that experts ran: the planner knows them, and plans nothing slower."""

from __future__ import annotations

import pytest

from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.hardware import cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import model
from drumline.plan.layouts.planner import HEADROOM, limit_of
from expert_layouts import EXPERTS, pinned, planned
from matrices import left

NAMES = {f"{entry[0]}-{entry[2].num_devices}": entry for entry in EXPERTS}
CASES = pytest.mark.parametrize(("name", "hardware", "layout"), NAMES.values(), ids=NAMES)
BRIEF = ("bloom-176b-384",)


@CASES
def test_the_layout_of_an_expert_is_among_those_that_are_compared(name: str, hardware: str, layout: Layout) -> None:
    transformer, machines = model(name), cluster(hardware, layout.num_devices)
    theirs, ours = estimate(transformer, machines, layout, exact=True), pinned(transformer, machines, layout)
    if layout.counts:
        assert ours.layout == layout
    else:  # their cut is even, and they had no sequence parallelism
        assert ours.layout.sequence_parallel
        assert ours.seconds <= theirs.seconds.total


@pytest.mark.slow
@pytest.mark.parametrize("case", [*BRIEF, *left(*(name for name in NAMES if name not in BRIEF))])
def test_the_plan_is_no_slower_than_the_layout_of_an_expert(case: str) -> None:
    name, hardware, layout = NAMES[case]
    transformer, machines = model(name), cluster(hardware, layout.num_devices)
    theirs, ours = (
        estimate(transformer, machines, layout, exact=True),
        planned(transformer, machines, layout, limit_of(machines, HEADROOM)),
    )
    assert ours.bytes <= limit_of(machines, HEADROOM)
    assert ours.seconds <= theirs.seconds.total
