"""Several steps of Schedule1F1B in one trace that neither labels nor the profiler tell apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from drumline.cli.main import main
from drumline.core.costs import Costs
from drumline.core.errors import TraceError
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.report.kineto.load import load
from kineto_traces import BEGIN, UNIT, Event, Rank, event, host_events, info, mark, save
from programs import build
from refused import refused

COSTS = Costs(forward=2, backward_input=3, backward_weight=1.5, comm=0.25)
MILLI = 1e-3
Marks = Mapping[str, tuple[float, float]]


def steps_of(ranks: int, counts: Sequence[int]) -> list[Simulation]:
    return [simulate(build("1f1b", ranks, count), COSTS) for count in counts]


def begins_of(steps: Sequence[Simulation]) -> list[float]:
    begins = [BEGIN]
    for step in steps:
        begins.append(begins[-1] + (step.makespan + 4) * UNIT)
    return begins


def write(folder: Path, steps: Sequence[Simulation], *, until: float | None = None, marks: Marks | None = None) -> Path:
    """Write a trace per rank of all steps, unmarked and unlabelled; an optimizer runs behind each of them."""
    for rank in range(steps[0].num_ranks):
        events: list[Event] = []
        for number, (step, begin) in enumerate(zip(steps, begins_of(steps), strict=False)):
            here = list(host_events(Rank(step, rank, begin), style="links"))
            for link in here:
                if link.get("cat") == "fwdbwd":
                    link["id"] += 1000 * number
            events += here
            at = begin + step.makespan * UNIT
            events.append(mark("Optimizer.step#SGD.step", at + 0.5 * UNIT, at + 2 * UNIT))
        events += [mark(name, *stretch) for name, stretch in (marks or {}).items()]
        kept = [entry for entry in events if until is None or entry["ts"] + entry.get("dur", 0) <= until]
        save(folder / f"rank{rank}.json", kept, distributedInfo=info(rank, steps[0].num_ranks), host_name="one")
    return folder


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("counts", [(8, 8, 8), (4, 8, 2), (1, 6), (2, 1, 1, 5), (6,)])
def test_every_step_is_found_where_the_pipeline_is_empty(tmp_path: Path, ranks: int, counts: tuple[int, ...]) -> None:
    expected = steps_of(ranks, counts)
    traces = load([write(tmp_path, expected)])
    assert list(traces.steps) == list(range(len(counts)))
    assert traces.incomplete == ()
    assert traces.by_flushes
    for found, item in zip(traces.steps.values(), expected, strict=True):
        assert found.program == item.program
        assert found.program.name == ("1f1b" if item.program.num_microbatches > 1 else "naive")  # of one, all are alike
        assert found.num_flushes == 1
        assert found.makespan == pytest.approx(MILLI * item.makespan, abs=1e-7)
        assert found.bubble == pytest.approx(item.bubble, abs=1e-5)
        assert sorted(str(move.action) for move in found.transfers) == sorted(
            str(move.action) for move in item.transfers
        )
        # The optimizer belongs to the step before it.
        assert all(any("Optimizer" in other.name for other in rank.others) for rank in found.ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_that_is_cut_off_is_left_out_and_named(tmp_path: Path, ranks: int) -> None:
    steps = steps_of(ranks, (4, 6, 8))
    begins = begins_of(steps)
    for share in (0.2, 0.5, 0.8, 0.95):
        until = begins[2] + share * steps[2].makespan * UNIT
        traces = load([write(tmp_path, steps, until=until)])
        assert list(traces.steps) == [0, 1]
        assert traces.incomplete == (2,)
        assert [step.program.num_microbatches for step in traces.steps.values()] == [4, 6]


def test_a_trace_that_begins_within_a_step_is_refused_plainly(tmp_path: Path) -> None:
    first, second = steps_of(2, (4, 4))
    write(tmp_path, [first, second])
    middle = BEGIN + 0.7 * first.makespan * UNIT
    for path in tmp_path.glob("*.json"):
        trace = json.loads(path.read_text())
        trace["traceEvents"] = [post for post in trace["traceEvents"] if post["ts"] >= middle]
        path.write_text(json.dumps(trace))
    with refused(TraceError, "begins in the middle of a step: its first backward comes before any forward"):
        load([tmp_path])


def test_steps_under_one_mark_of_the_profiler_are_said_to_be_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = steps_of(2, (8, 8, 8))
    whole = {"ProfilerStep#7": (BEGIN - 2 * UNIT, begins_of(steps)[-1])}
    folder = write(tmp_path, steps, marks=whole)
    traces = load([folder])
    assert list(traces.steps) == [7]
    assert not traces.by_flushes
    assert traces.step(7).num_flushes == 3
    assert main(["analyze", str(folder)]) == 0
    assert "the pipeline runs empty 3 times in this step" in " ".join(capsys.readouterr().out.split())


def test_the_report_says_how_steps_were_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, steps_of(2, (4, 8, 6)))
    assert main(["analyze", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    assert (found["steps_by_flushes"], found["flushes"], found["microbatches"]) == (True, 1, 6)
    assert main(["analyze", str(folder), "--step", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1f1b: 2 ranks, 2 stages, 8 microbatches; step 1 of 0 to 2" in shown
    assert "a step ends where the pipeline has run empty on all ranks" in shown


def test_marked_steps_of_different_lengths_are_all_complete(tmp_path: Path) -> None:
    steps = steps_of(3, (4, 8))
    begins = begins_of(steps)
    marks = {f"ProfilerStep#{at}": (begins[at] - UNIT, begins[at + 1] - UNIT) for at in range(2)}
    traces = load([write(tmp_path, steps, marks=marks)])
    assert [step.program.num_microbatches for step in traces.steps.values()] == [4, 8]
    assert traces.incomplete == ()


def test_frames_of_python_are_cut_at_the_same_places(tmp_path: Path) -> None:
    expected = steps_of(2, (4, 2))
    write(tmp_path, expected)
    frame = "torch/distributed/pipelining/stage.py(700): {}_one_chunk"
    for path in tmp_path.glob("*.json"):
        trace = json.loads(path.read_text())
        frames = [
            event("python_function", frame.format(kind), post["ts"], post["ts"] + post["dur"])
            for post in trace["traceEvents"]
            for name, kind in (("aten::mm", "forward"), ("autograd::engine", "backward"))
            if post["name"].startswith(name)
        ]
        trace["traceEvents"] += frames
        path.write_text(json.dumps(trace))
    traces = load([tmp_path])
    assert traces.found_by == "Python frames"
    assert [step.program for step in traces.steps.values()] == [simulation.program for simulation in expected]
