"""PyTorch's own schedules on two CPU ranks under PyTorch's own profiler: nothing of ours is in the loop."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from drumline.core.action import Op
from drumline.core.errors import TraceError
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.timeline.idle import Cause
from drumline.report.kineto.analysis import Analysis, analyze
from drumline.report.kineto.load import load
from drumline.report.kineto.timeline import TracedStep
from matrices import ALL
from refused import refused
from some import some
from torch_versions import RUNS_V_OVER_GLOO

pytestmark = [
    pytest.mark.torch,
    pytest.mark.matrix,  # `make test` reads those of docs/analyze.md
    pytest.mark.skipif(not ALL, reason="make matrices runs it"),
    pytest.mark.timeout(900),  # starts processes, which takes long on a busy machine
]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "record_traces.py"
NUM_MICROBATCHES = 4
ROUNDING = 2e-9  # the profiler writes thousandths of a microsecond
V_SHAPED = ("ZBVZeroBubble", "DualPipeV") if RUNS_V_OVER_GLOO else ()
SPELLED = ("Interleaved1F1B", "InterleavedZeroBubble", *V_SHAPED)
ONE_STAGE = ("GPipe", "1F1B", "1F1B-stack", "1F1B-slow1")
OURS = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "1F1B-stack": "1f1b",
    "1F1B-slow1": "1f1b",
    "Interleaved1F1B": "interleaved-1f1b",
    "InterleavedZeroBubble": "interleaved-zb",
    **({"ZBVZeroBubble": "zb-v", "DualPipeV": "dualpipe-v"} if RUNS_V_OVER_GLOO else {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All schedules, recorded by one start of two ranks."""
    pytest.importorskip("torch")
    home = tmp_path_factory.mktemp("traces")
    names = [*SPELLED, "GPipe", "1F1B", "1F1B,stack", "1F1B,slow=1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(home), *names], capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return home


@pytest.mark.parametrize("name", SPELLED)
def test_the_program_is_what_torch_says_it_ran(name: str, folder: Path) -> None:
    timeline = load([folder / name]).step()
    said = Program.load(folder / name / "order.csv")
    assert timeline.ran == said
    assert timeline.program == Program.of([[action for action in row if action.is_compute] for row in said.rows])


@pytest.mark.parametrize("name", ONE_STAGE)
def test_the_program_of_one_stage_a_rank_is_what_torch_runs(name: str, folder: Path) -> None:
    from torch_peer import order

    timeline = load([folder / name]).step()
    assert timeline.program == order(OURS[name], 2, NUM_MICROBATCHES)
    assert timeline.program.placement.name == "linear"


@pytest.mark.parametrize("name", OURS)
def test_every_step_is_there_proven_and_named(name: str, folder: Path) -> None:
    traces = load([folder / name])
    assert list(traces.steps) == [1, 2, 3]
    assert traces.incomplete == ()
    for timeline in traces.steps.values():
        assert timeline.program.name == OURS[name]
        assert validate(timeline.ran) == []
        assert timeline.program == traces.steps[1].program


@pytest.mark.parametrize("name", OURS)
def test_busy_and_idle_by_cause_are_the_makespan_on_every_rank(name: str, folder: Path) -> None:
    for timeline in some(load([folder / name]).steps.values()):
        assert timeline.makespan <= timeline.step_seconds
        for rank in range(2):
            mine = [cause for cause in timeline.causes if cause.rank == rank]
            assert sum(gap.seconds for gap in mine) + timeline.busy[rank] == pytest.approx(timeline.makespan, abs=1e-9)
            edges = sorted((idle.start, idle.end) for idle in mine)
            assert all(some(before[1] <= after[0] for before, after in pairwise(edges)))


class Raw:
    """One rank's file as it is, with times in seconds of a timeline made from it."""

    def __init__(self, folder: Path, name: str, rank: int, timeline: TracedStep) -> None:
        with gzip.open(folder / name / f"rank{rank}.json.gz", "rt") as file:
            self.events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
        [step] = [post for post in self.events if post["name"] == f"ProfilerStep#{timeline.step}"]
        begins = timeline.seconds(rank, timeline.ranks[rank].start)
        for event in self.events:
            event["start"] = begins + (event["ts"] - step["ts"]) * 1e-6
            event["end"] = event["start"] + event["dur"] * 1e-6
        self.step = step

    def named(self, text: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["name"].startswith(text) and within(event, self.step)]


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["start"] <= inner["start"] and inner["end"] <= outer["end"])


@pytest.mark.parametrize(
    "name", [value for value in SPELLED if value != "DualPipeV"]
)  # a pair waits in the middle, too
def test_an_action_is_its_label_without_the_wait_for_its_input(name: str, folder: Path) -> None:
    timeline = load([folder / name]).step(2)
    for rank in range(2):
        raw = Raw(folder, name, rank, timeline)
        labels = {entry["name"]: entry for entry in raw.named("PP:")}
        waits = [entry["end"] for entry in raw.named("gloo:recv")]
        track, computed = timeline.tracks[rank], 0
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
            label = labels[f"PP:{action}"]
            waited = max([label["start"], *(wait for wait in waits if label["start"] <= wait <= label["end"])])
            assert (start, end) == pytest.approx((waited, label["end"]), abs=ROUNDING)
            computing = [entry for entry in raw.named("aten::") if within(entry, label)]
            outside = [item for item in computing if item["start"] < start - ROUNDING or item["end"] > end + ROUNDING]
            assert outside == []
            computed += len(computing)  # a W of torch's may be empty: its I has done all
        assert computed > len(track.actions)


def test_a_forward_of_gpipe_neither_holds_its_receive_nor_its_send(folder: Path) -> None:
    timeline = load([folder / "GPipe"]).step(2)
    for rank in range(2):
        raw = Raw(folder, "GPipe", rank, timeline)
        calls = [*raw.named("c10d::send"), *raw.named("c10d::recv_")]
        assert calls
        track = timeline.tracks[rank]
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
            [label] = raw.named(f"{'Forward' if action.op is Op.FORWARD else 'Backward'} {action.microbatch}")
            computing = [entry for entry in raw.named("aten::") if within(entry, label)]
            linear = [entry for entry in computing if entry["name"] in ("aten::addmm", "aten::mm")]
            assert linear
            assert all(start - ROUNDING <= entry["start"] and entry["end"] <= end + ROUNDING for entry in linear)
            assert not [call for call in calls if start + ROUNDING < call["start"] < end - ROUNDING]


@pytest.mark.parametrize("name", ["1F1B", "1F1B-stack"])
def test_1f1b_is_read_without_any_label(name: str, folder: Path) -> None:
    traces = load([folder / name])
    assert traces.found_by == ("Python frames" if name == "1F1B-stack" else "autograd's links")
    timeline = traces.step(2)
    for rank in range(2):
        raw = Raw(folder, name, rank, timeline)
        assert not raw.named("PP:")
        assert not raw.named("Forward")
        track = timeline.tracks[rank]
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
            inside = [event["name"] for event in raw.events if start <= event["start"] and event["end"] <= end]
            backward = any(value.startswith("autograd::engine::evaluate_function") for value in inside)
            assert backward == (action.op is Op.BACKWARD)
            assert "c10d::send" not in inside
            assert "c10d::recv_" not in inside
        # All work that autograd did in this step was done in the backwards.
        steps = raw.named("autograd::engine::evaluate_function")
        found = list(zip(track.starts, track.ends, strict=True))
        assert all(some(any(low - ROUNDING <= step["start"] <= high for low, high in found) for step in steps))


@pytest.mark.parametrize("name", ["1F1B", "1F1B-stack", "1F1B-slow1"])
def test_steps_of_1f1b_are_found_without_the_profilers_marks(name: str, folder: Path, tmp_path: Path) -> None:
    for path in some((folder / name).glob("*.json.gz")):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        kept = [event for event in trace["traceEvents"] if not str(event.get("name", "")).startswith("ProfilerStep")]
        assert len(kept) < len(trace["traceEvents"])
        (tmp_path / path.name).write_bytes(gzip.compress(json.dumps({**trace, "traceEvents": kept}).encode()))
    marked, found = load([folder / name]), load([tmp_path])
    assert (marked.by_flushes, found.by_flushes) == (False, True)
    assert len(marked.steps) > 1
    assert [step.program for step in found.steps.values()] == [step.program for step in marked.steps.values()]
    assert [times(step) for step in found.steps.values()] == [times(step) for step in marked.steps.values()]


def times(timeline: TracedStep) -> list[tuple[list[float], list[float]]]:
    return [(list(track.starts), list(track.ends)) for track in timeline.tracks]


@pytest.mark.parametrize("name", OURS)
def test_every_message_has_two_ends_and_its_bytes(name: str, folder: Path) -> None:
    timeline = load([folder / name]).step()
    placement, stages = timeline.program.placement, timeline.program.num_stages
    edges = [stage for stage in range(stages - 1) if placement.homes[stage] != placement.homes[stage + 1]]
    assert len(timeline.transfers) == 2 * len(edges) * NUM_MICROBATCHES
    for transfer in timeline.transfers:
        assert transfer.num_bytes == 32 * 128 * 4
        assert transfer.made <= transfer.start <= transfer.end <= transfer.consumed


def test_waiting_ends_and_transfer_begins_when_the_input_is_made(folder: Path) -> None:
    waited = []
    recorded = Path(__file__).resolve().parents[2] / "docs" / "traces" / "1f1b"  # rank 0 waited for rank 1 in these
    for timeline in some((*load([folder / "1F1B-slow1"]).steps.values(), *load([recorded]).steps.values())):
        made = {span.action: span.end for span in timeline.spans()}
        for cause in some(timeline.causes):
            if cause.cause is Cause.WAIT:
                assert cause.waits_for is not None
                assert cause.on_rank == cause.waits_for.stage  # one stage on every rank
                assert cause.end <= made[cause.waits_for]
                waited.append(cause)
            elif cause.cause is Cause.TRANSFER and cause.waits_for in made:
                assert cause.start >= made[cause.waits_for]
    assert any(idle.rank == 0 and idle.waits_for and idle.waits_for.op is Op.BACKWARD for idle in waited)


def test_the_stage_that_took_longest_is_named_as_the_slowest(folder: Path) -> None:
    slow = analyze([folder / "1F1B-slow1"])
    seconds: dict[tuple[int, Op], list[float]] = {}
    for span in slow.timeline.spans():
        seconds.setdefault((span.action.stage, span.action.op), []).append(span.end - span.start)
    totals = [sum(median(seconds[stage, op]) for op in (Op.FORWARD, Op.BACKWARD)) for stage in range(2)]
    assert [stage.total for stage in slow.stages] == pytest.approx(totals)
    assert slow.slowest.stage == max(range(2), key=totals.__getitem__)
    assert slow.ideal is not None
    assert slow.ideal.makespan <= slow.timeline.makespan
    assert slow.advice.sentence


def test_a_step_that_is_asked_for_is_the_one_reported(folder: Path) -> None:
    found: dict[int, Analysis] = {step: analyze([folder / "GPipe"], step=step) for step in (1, 2, 3)}
    assert {step: analysis.timeline.step for step, analysis in found.items()} == {1: 1, 2: 2, 3: 3}
    middle = sorted(analysis.timeline.makespan for analysis in found.values())[1]
    assert analyze([folder / "GPipe"]).timeline.makespan == middle


def test_ranks_of_different_runs_are_refused(folder: Path) -> None:
    def mixed(text: str, other: str) -> list[Path]:
        return [folder / text / "rank0.json.gz", folder / other / "rank1.json.gz"]

    with refused(TraceError, "identified in different ways"):
        load(mixed("GPipe", "1F1B"))
    if V_SHAPED:
        with refused(TraceError, "has no matching"):
            load(mixed("ZBVZeroBubble", "Interleaved1F1B"))
    with refused(TraceError, "both from rank 0"):
        load([folder / "GPipe" / "rank0.json.gz", folder / "1F1B" / "rank0.json.gz"])
    for name in ("GPipe", "1F1B", "Interleaved1F1B"):
        for rank in range(2):
            with refused(TraceError, "no trace of a rank|has no matching"):
                load([folder / name / f"rank{rank}.json.gz"])
