"""`drumline analyze`: its report, its JSON and its pictures of a profiled step."""

from __future__ import annotations

import gzip
import json
import re
import xml.etree.ElementTree as Xml
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from kineto_traces import mark, save, written
from names import build
from some import some
from unpacking import unpacked

MILLI = 1e-3


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["analyze", *words])
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code, out, err = run(capsys, *words, "--json")
    assert err == ""
    found = json.loads(out)
    assert isinstance(found, dict)
    return code, found


@pytest.fixture
def timeline() -> Simulation:
    return simulate(build("1f1b", 3, 4), Costs(forward=[1, 2, 1], backward=[2, 4, 2], comm=0.25))


@pytest.fixture
def traces(timeline: Simulation, tmp_path: Path) -> str:
    return str(written(timeline, tmp_path / "traces", num_steps=2))


def test_the_report_has_the_figures_of_the_step(
    timeline: Simulation, traces: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, traces)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    first = "1f1b: 3 ranks, 3 stages, 4 microbatches; step 0 of 0 to 1, actions found by labels PP:"
    assert lines[0] == first
    assert (
        f"of which the pipeline takes {timeline.makespan:.4g} ms, bubble {timeline.bubble:.2%} of the pipeline" in out
    )
    best = simulate(timeline.program, Costs(forward=[1, 2, 1], backward=[2, 4, 2]))
    assert f"at best {best.makespan:.4g} ms, bubble {best.bubble:.2%}" in out
    assert "slowest stage: 1, on rank 1; a microbatch takes 6 ms, 1.50 times the mean" in out
    assert "clocks: one host, one clock" in out
    heading = next(at for at, line in enumerate(lines) if line.startswith("rank  stages"))
    assert lines[heading].split()[:4] == ["rank", "stages", "busy", "idle"]
    for rank in range(3):
        cells = lines[heading + 1 + rank].split()
        assert cells[:3] == [str(rank), str(rank), f"{timeline.busy[rank]:.4g}"]
    assert out.rstrip().endswith(f"instead of {best.makespan:.3g} ms.")  # the advice: equal stages


def test_no_line_is_wider_than_the_terminal(
    traces: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (40, 60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        assert max(map(len, run(capsys, traces)[1].splitlines())) <= width


def test_the_object_adds_up(timeline: Simulation, traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, traces)
    assert code == 0
    assert found["makespan"] == pytest.approx(timeline.makespan * MILLI)
    assert (found["step"], [step["step"] for step in found["steps"]]) == (0, [0, 1])
    assert found["slowest_stage"] == 1
    assert found["violations"] == []
    assert len(found["spans"]) == timeline.program.num_actions
    for rank in range(3):
        idle = sum(seconds[rank] for seconds in found["idle_by_cause"].values())
        assert idle + found["busy"][rank] == pytest.approx(found["makespan"])
        listed = [interval for interval in found["intervals"] if interval["rank"] == rank]
        assert sum(value["end"] - value["start"] for value in listed) == pytest.approx(found["idle"][rank])
    assert found["ideal"]["makespan"] < found["makespan"]
    assert {transfer["send"] for transfer in found["transfers"]} == {str(item.action) for item in timeline.transfers}


def test_a_step_is_chosen_by_its_number(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, traces, "--step", "1")[1]["step"] == 1
    code, found = run_json(capsys, traces, "--step", "7")
    assert code == 2
    assert found == {"error": "step 7 is not in the traces", "expected": "one of the steps 0, 1", "fix": ""}


def test_the_program_goes_on_to_the_other_verbs(
    timeline: Simulation, traces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ran.csv"
    assert run(capsys, traces, "--format", "csv", "--out", str(path)) == (0, f"wrote {path}\n", "")
    program = Program.load(path)
    assert program.has_communication
    assert program.compute_only() == timeline.program
    assert main(["check", str(path), "--channel", "edge"]) == 0
    assert main(["simulate", str(path)]) == 0
    capsys.readouterr()
    assert run(capsys, traces, "--format", "csv")[1] == path.read_text()


def test_the_pictures_are_those_of_a_timeline(traces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = Xml.fromstring(run(capsys, traces, "--format", "svg")[1])
    assert sum(node.get("class") == "box" for node in drawn.iter()) == 24
    path = tmp_path / "trace.json.gz"
    assert run_json(capsys, traces, "--format", "perfetto", "--out", str(path))[1]["out"] == str(path)
    names = {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"0F0", "2B3", "wait", "transfer"} <= names
    assert run(capsys, traces, "--format", "perfetto", "--json")[0] == 2


def test_every_number_of_the_page_is_in_the_object(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = run(capsys, traces, "--format", "html")[1]
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    found = run_json(capsys, traces)[1]
    assert data["advice"] == found["advice"]
    for shown, said in zip(data["timelines"], (found, found["ideal"]), strict=True):
        for key in ("makespan", "bubble", "span_bubble", "stages", "microbatches"):
            assert shown[key] == pytest.approx(said[key])
        for rank, row in enumerate(shown["rows"]):
            starts = [value / shown["ticks_per_second"] for value in unpacked(row["start"])]
            lengths = [value / shown["ticks_per_second"] for value in unpacked(row["ticks"])]
            spans = [span for span in said["spans"] if span["rank"] == rank]
            assert starts == pytest.approx([span["start"] for span in spans], abs=1e-9)
            assert lengths == pytest.approx([span["end"] - span["start"] for span in spans], abs=1e-9)
    words = [word for row in data["timelines"][0]["why"]["rows"] for word in row["idle"]["words"]]
    wanted = [interval["why"] for interval in found["intervals"]]  # the page spells the usual sentences itself
    assert all(some(word in ("", value) for word, value in zip(words, wanted, strict=True)))


def test_a_trace_that_contradicts_the_rules_is_shown_and_gives_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "rank0.json", [mark("PP:0B0", 0, 1), mark("PP:0F0", 1, 2)])
    code, out, _ = run(capsys, str(path))
    assert code == 1
    assert "The traces break the rules of a pipeline:\nrank 0, position 0: 0B0 runs before 0F0" in out
    assert "at best" not in out
    assert run_json(capsys, str(path))[1]["ideal"] is None


def test_bad_input_is_told_in_one_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith(f"drumline: {tmp_path} contains no trace\n  expected files that end in .json")
    code, found = run_json(capsys, str(tmp_path))
    assert code == 2
    assert found["error"] == f"{tmp_path} contains no trace"
    assert found["expected"]
    assert found["fix"]
