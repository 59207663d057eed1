"""Of layouts that a forecast cannot tell apart, the plainest is run; what that is, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster_models import GIB, small_cluster, small_transformer
from drumline.plan.cluster.device_memory import Bytes
from drumline.plan.cluster.estimate import Estimate, Seconds, estimate
from drumline.plan.cluster.hardware import cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.loads import Volumes
from drumline.plan.cluster.models import model
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.planner import plan
from drumline.plan.layouts.preference import band, drawback, tightness
from drumline.plan.layouts.why import why

PLAIN = small_transformer()
LIMIT = 100.0 * GIB
PLAINEST = Layout(batch=64, data=8, counts=(12,), zero=1)


def weighed(seconds: float, held: float = 50.0, outside: float = 0.0, **change: Any) -> Choice:
    """Return a layout that takes and holds so much; `held` is a share of the limit in percent."""
    layout = replace(PLAINEST, **change)
    took, bytes_ = Seconds(seconds, *[0.0] * 8), Bytes(held / 100 * LIMIT, *[0.0] * 4)
    return Choice(layout, Estimate(took, bytes_, Volumes(*[0.0] * 5), 0.0, 0.0), outside=outside)


STAGED: dict[str, Any] = {"pipeline": 2, "data": 4, "counts": (6, 6)}
LOOPED: dict[str, Any] = {**STAGED, "counts": (3,) * 4, "stages_per_rank": 2, "schedule": "interleaved-1f1b"}
# Each pair: the layout to prefer, then one that is up to 1.9% faster, and what speaks against it.
PREFERRED: list[tuple[Choice, Choice, str]] = [
    (
        weighed(100, outside=0.19),
        weighed(99, outside=0.42),
        "keeps links between nodes busy for 42% of the step instead of 19%",
    ),
    # Less than a tenth does not count, and inside of a node nothing does.
    (weighed(100, outside=0.19), weighed(99, outside=0.11, **STAGED), "also divides by PP"),
    (weighed(100), weighed(98.2, **STAGED), "also divides by PP"),
    (weighed(100, tensor=8, data=1), weighed(99, tensor=2, pipeline=2, data=2, counts=(6, 6)), "also divides by PP"),
    (weighed(100, tensor=8, data=1), weighed(99, pipeline=2, data=2, context=2, counts=(6, 6)), "divides by PP and CP"),
    (weighed(100, 97), weighed(99, 50, recompute="norms"), "needs recomputation of norms"),
    (weighed(100, recompute="selective"), weighed(99, recompute="full"), "needs full recomputation"),
    (weighed(100, 89, zero=3), weighed(99, 91), "leaves only 9.0% of the memory free"),
    (weighed(100, 94, zero=3), weighed(99, 99), "leaves only 1.0% of the memory free"),
    (weighed(100, **STAGED), weighed(99, **LOOPED), "has 2 stages per rank"),
    (weighed(100, **STAGED), weighed(99, schedule="zb-h1", **STAGED), "runs zb-h1"),
    (weighed(100), weighed(99, 20, zero=3), "shards more, with ZeRO 3"),
]


@pytest.mark.parametrize(
    ("plain", "faster", "words"), PREFERRED, ids=lambda item: item if isinstance(item, str) else ""
)
def test_of_layouts_that_no_forecast_tells_apart_the_plainest_is_run(plain: Choice, faster: Choice, words: str) -> None:
    assert band([faster, plain], LIMIT) == [plain, faster]
    assert drawback(plain, faster, LIMIT) == words
    told = why(plain, faster, LIMIT)
    assert told == f"{1 - faster.seconds / plain.seconds:.1%} faster, less than a forecast can tell, but {words}"


def test_what_a_forecast_tells_apart_is_decided_by_its_seconds() -> None:
    plain, faster = weighed(100), weighed(97.9, 99, outside=0.9, recompute="full", **STAGED)
    assert band([plain, faster], LIMIT) == [faster]
    assert band([faster, weighed(99.8)], LIMIT)[0].layout == PLAINEST


def test_headroom_counts_in_steps_of_a_twentieth() -> None:
    assert [tightness(weighed(1, held), LIMIT) for held in (10, 90, 90.1, 95, 95.1, 100)] == [0, 0, 1, 1, 2, 2]


def test_only_bytes_that_leave_a_node_keep_its_links_busy() -> None:
    """By hand: 4 devices a node, links of 2e10 bytes a second; a ring through nodes has as many as devices in each."""
    machines = small_cluster(8)
    for layout, size in (
        (Layout(16, data=4, tensor=2, zero=1, counts=(12,)), 3),
        (Layout(16, data=8, zero=1, counts=(12,)), 3),
        (Layout(16, pipeline=2, data=4, zero=1, counts=(6, 6)), 0),
        (Layout(16, tensor=4, pipeline=2, zero=1, counts=(6, 6)), 0),
    ):
        costs = estimate(PLAIN, machines, layout)
        rings = {2: 2, 1: 4}
        seconds = costs.volumes.data / (rings[layout.tensor] * 2e10) if size else costs.volumes.pipeline / 2e10
        assert Choice.of(machines, layout, costs).outside == pytest.approx(seconds / costs.seconds.total)
        together = replace(machines, devices_per_node=8)
        assert Choice.of(together, layout, estimate(PLAIN, together, layout)).outside == 0.0


@pytest.mark.parametrize("batch", [64, 128])
def test_a_model_that_a_node_holds_is_not_cut_for_a_percent(batch: int) -> None:
    """8B on 8 H100 got a pipeline with recomputation, at 71.5 of 72 GiB, for fewer bytes over NVLink."""
    chosen = plan(model("llama-3-8b"), cluster("h100", 8), batch=batch, top=1).chosen
    assert chosen.axes == ()
    assert chosen.layout.recompute == "none"
    assert chosen.bytes < 68 * GIB
