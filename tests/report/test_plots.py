"""Plots by matplotlib, and the extra that is named where it is missing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from drumline.core.errors import UsageError
from drumline.core.measured.run import read_run
from drumline.core.timeline.idle import Cause
from drumline.report.draw.palette import IDLE
from drumline.report.draw.trace import traces
from drumline.report.run import follow
from drumline.report.run.plots import plots
from drumline.report.run.report import RunReport, report_of
from drumline.schedules import generate
from refused import refused
from simulated_runs import per_stage, write_simulated_run


@pytest.fixture
def report(tmp_path: Path) -> RunReport:
    program = generate("1f1b", num_ranks=2, num_microbatches=4)
    return report_of(read_run(write_simulated_run(tmp_path / "run", program, per_stage(1e-3, 2e-3))))


@pytest.mark.slow
def test_plots_are_a_png_or_an_svg_with_words_as_text(report: RunReport) -> None:
    pytest.importorskip("matplotlib")
    assert plots([report], file_type="png").startswith(b"\x89PNG")
    picture = plots([report, report], file_type="svg")
    ElementTree.fromstring(picture)
    assert picture.count(b">milliseconds<") == 4
    assert b"bubble by cause, % of makespan" in picture
    assert plots([report, report], file_type="svg") == picture, "equal reports give equal files"


def test_without_matplotlib_the_extra_is_named(report: RunReport, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(follow, "import_module", refuse)
    with refused(UsageError, "matplotlib is not installed", fix=r"pip install -e '\.\[viz\]'"):
        plots([report], file_type="png")


def test_every_cause_has_a_colour() -> None:
    assert list(IDLE) == list(Cause)


def test_a_trace_of_a_report_has_measured_and_simulated_ranks(report: RunReport) -> None:
    seen = report.step
    data = json.loads(gzip.decompress(traces({"measured": seen.measured, "simulated": seen.simulated})))
    events = data["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(" (")[0] for name in names] == [
        "measured, rank 0",
        "measured, rank 1",
        "simulated, rank 0",
        "simulated, rank 1",
    ]
    boxes = [(event["pid"], event["name"]) for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert [name for pid, name in boxes if pid == 3] == [str(action) for action in seen.simulated.tracks[1].actions]
    starts, ends = ({event["id"] for event in events if event["ph"] == kind} for kind in "sf")
    assert starts == ends
    assert len(starts) == len(seen.measured.transfers) + len(seen.simulated.transfers)
