"""Plans with one setting changed: what is offered can run, and what is compared fits where something does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster_models import GIB, Rough, small_cluster, small_transformer, sparse_transformer
from drumline.core.errors import PlanError
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import ClusterPlan, plan
from drumline.plan.layouts.space import layouts
from drumline.plan.layouts.what_if import against_fsdp, changes
from refused import refused

GPT = small_transformer()


def planned(batch: int, pins: Pins, *, memory: float = 64 * GIB, headroom: float = 0.0) -> ClusterPlan:
    cluster = small_cluster(4, memory=memory)
    return plan(GPT, cluster, batch=batch, pins=pins, surveyed=Rough().surveyed, headroom=headroom)


@pytest.mark.parametrize(("pipeline", "data", "batch"), [(4, 1, 24), (2, 2, 40)])
def test_other_sizes_of_microbatches_are_those_that_suit_the_schedule(pipeline: int, data: int, batch: int) -> None:
    """Interleaved 1F1B runs rounds of as many microbatches as ranks: 24 rows make 6 of 4, which 4 ranks do not."""
    name = "interleaved-1f1b"
    pins = Pins(tensor=1, pipeline=pipeline, data=data, schedules=(name,), stages_per_rank=3, microbatch=1)
    found = planned(batch, pins)
    assert (found.chosen.layout.schedule, found.chosen.layout.microbatch) == (name, 1)
    sizes = [change.choice.layout.microbatch for change in changes(found) if change.kind.startswith("microbatches of")]
    own = batch // data
    expected = [size for size in (2, 4, 8) if own % size == 0 and own // size % pipeline == 0]
    assert expected == [2], "others divide the batch, and not its microbatches into rounds"
    assert sizes == expected


def test_the_sharded_layout_to_compare_with_fits_where_one_does() -> None:
    pins = Pins(tensor=1, pipeline=4, data=1, zero=0, microbatch=1)
    every = [
        (Rough()(GPT, small_cluster(4), layout), layout)
        for layout in layouts(GPT, small_cluster(4), 32, Pins(pipeline=1, zero=3))
    ]
    fastest = min(every, key=lambda pair: pair[0].seconds.total)[0]
    smaller = [estimate for estimate, _ in every if estimate.bytes.total < fastest.bytes.total]
    assert smaller, "something holds less than the fastest"
    limit = min(smaller, key=lambda estimate: estimate.seconds.total).bytes.total  # it fits to the byte
    for room in (limit, min(estimate.bytes.total for estimate in smaller) / 2):
        fitting = [estimate for estimate, _ in every if estimate.bytes.total <= room] or [item for item, _ in every]
        found = against_fsdp(replaced(planned(32, pins), room))[-1][1]
        assert found.seconds == pytest.approx(min(estimate.seconds.total for estimate in fitting))
        assert (found.bytes <= room) == (room == limit)


def replaced(found: ClusterPlan, limit: float) -> ClusterPlan:
    """Return the plan with exactly this much memory on a device."""
    device = replace(found.cluster.device, memory_bytes=limit)
    made = replace(found, cluster=replace(found.cluster, device=device))
    assert made.limit_bytes == limit
    return made


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (Pins(expert=8, data=4, tensor=1, pipeline=1), "EP 8 cannot share 8 experts on 4 devices"),
        (Pins(data=4), "DP 4 does not divide a batch of 30 sequences"),
    ],
)
def test_what_contradicts_is_told_apart_for_models_with_experts(pins: Pins, words: str) -> None:
    with refused(PlanError, words):
        plan(
            sparse_transformer(),
            small_cluster(4),
            batch=32 if pins.expert else 30,
            surveyed=Rough().surveyed,
            pins=pins,
        )
