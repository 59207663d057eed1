"""PyTorch's own schedules on two ranks that share an H200 and talk by NCCL, as its profiler recorded them."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from drumline.core.action import Op
from drumline.core.prove.validate import validate
from drumline.report.kineto.analysis import analyze
from drumline.report.kineto.load import load
from drumline.schedules import generate
from some import some

TRACES = Path(__file__).resolve().parents[2] / "docs" / "traces"


def raw(name: str, rank: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress((TRACES / name / f"rank{rank}.json.gz").read_bytes()))[
        "traceEvents"
    ]
    return events


@pytest.mark.parametrize(("name", "found_by"), [("1f1b", "autograd's links"), ("zb-v", "labels PP:")])
def test_the_program_is_the_schedule_that_ran(name: str, found_by: str) -> None:
    traces = load([TRACES / name])
    timeline = traces.step()
    assert traces.found_by == found_by
    assert timeline.program == generate(name, num_ranks=2, num_microbatches=8)
    assert validate(timeline.ran) == []
    assert {transfer.num_bytes for transfer in timeline.transfers} == {256 * 4096 * 4}
    assert len(timeline.transfers) == {"1f1b": 16, "zb-v": 32}[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_every_kernel_that_computes_is_in_an_action_or_named(name: str) -> None:
    timeline = load([TRACES / name]).step()
    assert timeline.kernel_seconds is not None
    for rank in range(2):
        kernels = [entry for entry in raw(name, rank) if entry["cat"] in ("kernel", "gpu_memset", "gpu_memcpy")]
        computed = sum(kernel["dur"] for kernel in kernels if "nccl" not in kernel["name"]) * 1e-6
        others = [other for other in timeline.ranks[rank].others if other.name.startswith("kernels")]
        outside = sum(other.end - other.start for other in others) * 1e-9
        assert timeline.kernel_seconds[rank] + outside == pytest.approx(computed, rel=1e-3)
        assert outside < 0.1 * computed  # the optimizer and the scaling of gradients
        assert timeline.kernel_seconds[rank] <= timeline.busy[rank]


def test_backwards_count_what_the_profilers_annotations_of_the_device_leave_out() -> None:
    timeline = load([TRACES / "zb-v"]).step()
    annotated: defaultdict[str, float] = defaultdict(float)
    for entry in raw("zb-v", 0):
        if entry["cat"] == "gpu_user_annotation" and entry["name"].startswith("PP:"):
            annotated[re.sub(r"PP:|\d", "", entry["name"])] += entry["dur"] * 1e-6
    found: defaultdict[Op, float] = defaultdict(float)
    track = timeline.tracks[0]
    for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
        found[action.op] += end - start
    assert found[Op.FORWARD] == pytest.approx(annotated["F"], rel=1e-5)
    assert annotated["I"] < 0.001 * found[Op.BACKWARD_INPUT]
    assert annotated["W"] < 0.5 * found[Op.BACKWARD_WEIGHT]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_message_moves_while_both_kernels_run(name: str) -> None:
    timeline = load([TRACES / name]).step()
    for transfer in some(timeline.transfers):
        source, target, sent, received = timeline.messages[transfer.action]
        assert sent.done is not None
        assert received.done is not None
        begun = max(timeline.seconds(source, sent.begun), timeline.seconds(target, received.begun))
        assert begun <= transfer.start + 1e-9 or transfer.start == transfer.end
        assert transfer.end <= transfer.consumed
    for rank in range(2):
        idle = sum(cause.seconds for cause in timeline.causes if cause.rank == rank)
        assert idle == pytest.approx(timeline.idle[rank], abs=1e-9)


@pytest.mark.slow
def test_a_smaller_bubble_is_seen_to_be_smaller() -> None:
    plain, zero = (analyze([TRACES / name]) for name in ("1f1b", "zb-v"))
    assert zero.timeline.bubble < 0.6 * plain.timeline.bubble
    for analysis in (plain, zero):
        assert analysis.ideal is not None
        assert analysis.ideal.makespan < analysis.timeline.makespan
