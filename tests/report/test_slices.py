"""Slices in pictures: every one says which slice of which microbatch an action runs on."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from drumline.core.action import Op, SliceNumber
from drumline.core.costs import Costs
from drumline.core.errors import CostsError, DrumlineError
from drumline.core.simulate.simulate import simulate
from drumline.report.compare import compare
from drumline.report.draw.grid import grid, legend
from drumline.report.draw.palette import SHADES, fill
from drumline.report.draw.scene import document
from drumline.report.draw.svg import svg
from drumline.report.draw.trace import trace
from drumline.report.explore import Sliders, answer, export
from drumline.report.replicas.step import replicas
from drumline.schedules import generate
from refused import refused

SMALL = generate("1f1b", num_ranks=2, num_microbatches=2, slices=2)


def test_the_grid_labels_slices() -> None:
    lines = grid(simulate(SMALL), width=120).splitlines()
    assert re.findall(r"[FB]\d\.\d", lines[0]) == [str(action)[1:] for action in SMALL.rows[0]]
    assert re.findall(r"[FB]\d\.\d", lines[1]) == [str(action)[1:] for action in SMALL.rows[1]]
    assert legend(simulate(SMALL)) == "Peak: activations held, one per stage and slice."


def test_slices_have_the_hue_of_their_microbatch_and_every_second_is_paler() -> None:
    colours = [fill(Op.FORWARD, SliceNumber.of(number, 2)) for number in range(5)]
    assert colours[0] == colours[4] == SHADES[Op.FORWARD].even
    assert colours[2] == SHADES[Op.FORWARD].odd
    assert len(set(colours)) == 4
    painted = grid(simulate(SMALL), width=120, colour=True)
    assert len(set(re.findall(r"48;5;(\d+)", painted))) == 8


def test_the_sheet_labels_and_names_slices() -> None:
    picture = svg(simulate(SMALL))
    assert ">0.1</text>" in picture
    assert "<title>0B0.1: " in picture
    assert "2 microbatches in 2 slices" in picture


def test_the_page_knows_how_many_slices_there_are() -> None:
    page = document([simulate(SMALL)])
    assert (page["timelines"][0]["microbatches"], page["timelines"][0]["slices"]) == (2, 2)
    assert {"even", "odd", "pale_even", "pale_odd"} <= set(page["ops"][0])


def test_traces_name_slices() -> None:
    events = json.loads(gzip.decompress(trace(simulate(SMALL))))["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"0F0.0", "1B1.1", "0SEND_F1.0"} <= names | {event["name"] for event in events}
    assert not {name for name in names if re.fullmatch(r"\d+[FBIW]\d+", name)}


def test_the_explorer_takes_slices() -> None:
    sliders = Sliders.of({"schedule": "1f1b", "ranks": "4", "microbatches": "4", "slices": "4", "attention": "0.4"})
    found = answer(sliders)
    costs = Costs(attention=0.4)
    wanted = simulate(generate("1f1b", num_ranks=4, num_microbatches=4, slices=4), costs)
    assert found["summary"]["makespan"] == wanted.makespan
    assert (found["summary"]["slices"], found["summary"]["microbatches"]) == (4, 4)
    assert export(sliders, "csv")[2].startswith(b"0F0.0,0F0.1")
    with refused(DrumlineError, "runs microbatches in slices"):
        export(sliders, "torch")
    assert answer(Sliders(schedule="chimera", slices=4))["error"]["error"].startswith("chimera cannot run microbatches")


def test_a_comparison_does_the_same_work_in_slices() -> None:
    rows = {row.name: row for row in compare(4, num_microbatches=4, slices=4, costs=Costs(activation_bytes=1))}
    assert {"1f1b in 4 slices"} == {row.timeline.program.name for name, row in rows.items() if name == "1f1b"}
    assert {round(sum(row.timeline.busy), 9) for row in rows.values()} == {48.0}
    assert rows["1f1b"].peak_share == 7 / 4
    with refused(CostsError, "slice_lengths has 3 values"):
        compare(4, num_microbatches=4, slices=4, costs=Costs(slice_lengths=[1, 2, 3]))
    assert not compare(2, num_microbatches=2, slices=4, only=[SMALL])


def test_replicas_run_slices() -> None:
    program = generate("1f1b", num_ranks=4, num_microbatches=2, slices=4)
    step = replicas(program, Costs(attention=0.4), num_replicas=2)
    assert step.makespan == pytest.approx(simulate(program, Costs(attention=0.4)).makespan)
    assert step.summary()["slices"] == 4
