"""What a report says of a run, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.core.costs import Costs, Edge
from drumline.core.errors import RecordError
from drumline.core.measured.record import Record
from drumline.core.measured.run import read_run
from drumline.core.simulate.simulate import simulate
from drumline.report.run.follow import PARTS
from drumline.report.run.page import _ranks, run_page
from drumline.report.run.report import RunReport, report_of, reports_of
from drumline.report.run.text import report_text, reports_text
from drumline.schedules import generate
from records import line
from refused import refused
from simulated_runs import even_blocks, per_stage, write_simulated_run

PROGRAM = generate("1f1b", num_ranks=2, num_microbatches=4)
COSTS = per_stage(1e-3, 2e-3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_simulated_run(tmp_path / "first", PROGRAM, COSTS, blocks=even_blocks(2, 4), num_steps=5, jitter=0.1)


@pytest.fixture
def report(folder: Path) -> RunReport:
    return report_of(read_run(folder))


def test_the_figures_are_those_of_the_timelines(report: RunReport) -> None:
    found = report.to_json()
    measured = report.step.measured
    assert found["makespan"] == measured.makespan
    assert found["bubble"] == measured.bubble
    assert found["utilisation"] == 1 - measured.bubble
    assert found["slowest_stage"] == 1
    assert found["measured"]["tracks"][1]["actions"] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]
    assert found["simulated"]["tracks"][0]["ends"][-1] == pytest.approx(report.step.simulated.makespan)
    assert [value["rank"] for value in found["per_rank"]] == [0, 1]
    for rank in range(2):
        causes = sum(seconds[rank] for seconds in found["measured"]["idle_by_cause"].values())
        assert causes == pytest.approx(measured.idle[rank])
    json.dumps(found, allow_nan=False)


def test_the_page_names_the_blocks_of_every_stage(tmp_path: Path) -> None:
    """Nothing else of a page says which blocks a stage has."""
    program = generate("1f1b", num_ranks=3, num_microbatches=4)
    blocks = [["0"], ["1", "2"], ["3", "4", "5"]]
    folder = write_simulated_run(tmp_path / "run", program, per_stage(1e-3, 1e-3, 1e-3), blocks=blocks, num_steps=3)
    page = run_page([report_of(read_run(folder))])
    for rank, words in enumerate(("block 0", "blocks 1 to 2", "blocks 3 to 5")):
        assert f">{words}, rank {rank}<" in page
        assert f">stage {rank}<" in page


def test_the_page_tells_changes_only_where_there_were_any(folder: Path) -> None:
    words = "What was changed while it ran"
    assert words not in run_page([report_of(read_run(folder))])
    moved = {"run": "abc", "step": 3, "kind": "move", "balance_before": [4, 4], "balance_after": [5, 3], "seconds": {}}
    (folder / "decisions.jsonl").write_text(json.dumps(moved) + "\n")
    page = run_page([report_of(read_run(folder))])
    assert words in page
    assert "5 | 3 blocks" in page


def test_parts_of_a_rank_sum_to_its_step(report: RunReport) -> None:
    for rank in report.ranks:
        parts = sum(rank[part] for part in ("busy", "wait", "transfer", "overhead", "unexplained"))
        assert parts == pytest.approx(rank["step_seconds"])


def test_the_step_is_the_one_in_the_middle_unless_it_is_named(folder: Path) -> None:
    run = read_run(folder)
    spans = {metric["step"]: metric["pp/makespan_seconds"] for metric in run.metrics() if metric["step"] > 0}
    assert spans[report_of(run).step.step] == sorted(spans.values())[2]
    assert report_of(run, step=3).step.step == 3
    assert report_of(run, step=3).step.pooled == (3,)


def test_every_step_has_its_line(report: RunReport) -> None:
    assert [step["step"] for step in report.steps] == [0, 1, 2, 3, 4]
    assert [step["loss"] for step in report.steps][:2] == [1.0, 0.5]
    assert all(step["utilisation"] == 1 - step["bubble"] for step in report.steps)


def test_without_metrics_the_last_step_is_reported(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("")
    report = report_of(read_run(folder))
    assert report.step.step == 4
    assert report.steps == []
    assert "step 4 of 5 steps" in reports_text([report])


def test_the_text_has_a_row_per_rank_the_grid_and_the_advice(report: RunReport) -> None:
    text = reports_text([report], width=100)
    assert text.startswith("first: 1f1b, 2 ranks, 2 stages, 4 microbatches, step ")
    lines = text.splitlines()
    header = next(line for line in lines if line.startswith("rank  stages"))
    assert header.split() == [
        "rank",
        "stages",
        "busy",
        "wait",
        "transfer",
        "overhead",
        "unexplained",
        "idle",
        "peak",
        "stash",
    ]
    assert sum(line.startswith(("rank 0 |", "rank 1 |")) for line in lines) == 2
    assert "slowest stage 1 on rank 1" in text
    assert "slower: move block 4 to rank 0 (balance=[5, 3]), predicted -" in text
    assert max(map(len, lines)) <= 100


def test_a_link_slower_than_every_stage_is_named(tmp_path: Path, report: RunReport) -> None:
    slow = replace(COSTS, edges={(0, 1): Edge(0.5), (1, 0): Edge(1e-4)})
    text = report_text(report_of(read_run(write_simulated_run(tmp_path / "slow", PROGRAM, slow))), width=200)
    named = "slowest link from rank 0 to rank 1: 500 ms per message, longer than any stage takes for a microbatch"
    assert named in text.splitlines()
    assert "slowest link" not in report_text(report)


def test_bytes_are_shown_where_they_were_weighed(tmp_path: Path) -> None:
    path = write_simulated_run(tmp_path / "run", PROGRAM, COSTS, weigh=2**20)
    report = report_of(read_run(path))
    assert [rank["peak_stash_bytes"] for rank in report.ranks] == [2 * 2**20, 2**20]
    assert "2 MiB" in reports_text([report])
    assert report.step.measured.peak_bytes == (2 * 2**20, 2**20)


def test_several_runs_stand_side_by_side_under_names_that_differ(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        write_simulated_run(tmp_path / place / "run", PROGRAM, COSTS, run=place)
    other = write_simulated_run(
        tmp_path / "other", generate("gpipe", num_ranks=2, num_microbatches=4), Costs(forward=1e-3)
    )
    found = reports_of([read_run(path) for path in (tmp_path / "a/run", tmp_path / "b/run", other)])
    assert [run_report.name for run_report in found] == ["a/run", "b/run", f"{tmp_path.name}/other"]
    head = reports_text(found, width=120).split("\n\n")[0].splitlines()
    assert len(head) == 4
    assert head[3].split()[:2] == [f"{tmp_path.name}/other", "gpipe"]


def test_a_step_of_many_spans_is_reported(tmp_path: Path) -> None:
    program = generate("zb-h1", num_ranks=4, num_microbatches=64)
    costs = Costs(forward=1e-3, backward_input=1e-3, backward_weight=1e-3)
    report = report_of(read_run(write_simulated_run(tmp_path / "run", program, costs, num_steps=1)))
    assert report.step.simulated.makespan == pytest.approx(simulate(program, costs).makespan)


def test_a_run_without_a_complete_step_is_refused(tmp_path: Path) -> None:
    path = write_simulated_run(tmp_path / "run", PROGRAM, COSTS, num_steps=0)
    with refused(RecordError, r"no step in .* is complete on all ranks yet"):
        report_of(read_run(path))


def test_an_unknown_step_is_refused_with_those_that_are_there(folder: Path) -> None:
    with refused(RecordError, "has no step 9", expected="step 0 to 4"):
        report_of(read_run(folder), step=9)


def test_ranks_of_different_runs_are_refused(folder: Path, tmp_path: Path) -> None:
    other = write_simulated_run(tmp_path / "other", PROGRAM, COSTS, run="xyz")
    (folder / "rank1.jsonl").write_bytes((other / "rank1.jsonl").read_bytes())
    with refused(RecordError, "rank1.jsonl belongs to the run xyz", expected="abc"):
        report_of(read_run(folder))


def test_captured_steps_have_no_report_and_are_passed_over(folder: Path) -> None:
    for rank in range(2):
        with (folder / f"rank{rank}.jsonl").open("a") as file:
            file.write(line(Record(rank, 5, begin_ns=10, end_ns=20)))
    assert report_of(read_run(folder)).step.step < 5
    with refused(RecordError, "step 5 was captured, so its actions have no times"):
        report_of(read_run(folder), step=5)


def disturbed(folder: Path, makespans: Sequence[float], **machine: Any) -> RunReport:
    """Return the report of a run whose steps took these times on such a machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [{**lines[0], "step": step, "pp/makespan_seconds": makespan} for step, makespan in enumerate(makespans)]
    texts = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
    (folder / "metrics.jsonl").write_text("".join(texts))
    (folder / "environment.json").write_text(json.dumps({"run": lines[0]["run"], "ranks": [machine]}))
    return report_of(read_run(folder))


def test_a_busy_machine_is_named_and_advice_withheld(folder: Path) -> None:
    quiet = disturbed(folder, [9.0, 1.0, 1.01, 0.99, 1.0], cores=2, load=0.3)
    assert not quiet.steadiness.busy
    assert quiet.figures()["busy_machine"] == ""
    uneven = disturbed(folder, [9.0, 1.0, 2.0, 1.5, 3.0], cores=2, load=0.3)
    assert uneven.figures()["busy_machine"] == "This machine was busy: equal steps differ by 50%."
    assert uneven.advice.remedies == ()
    shared = disturbed(folder, [1.0] * 5, cores=2, load=5.5)
    words = "This machine was busy: other work asked for 5.5 of its 2 cores. Advice is withheld"
    assert shared.advice.sentence.startswith(words)
    assert words in report_text(shared).replace("\n  ", " ")


def test_what_a_machine_did_not_write_down_says_nothing(folder: Path) -> None:
    assert not disturbed(folder, [1.0] * 5).steadiness.busy
    assert not disturbed(folder, [1.0] * 5, cores="two", load=None).steadiness.busy


def test_runs_of_a_busy_machine_are_not_compared(folder: Path) -> None:
    report = disturbed(folder, [1.0] * 5, cores=2, load=5.5)
    page = run_page([report, replace(report, name="other")])
    assert "Times of these runs cannot be compared." in page
    assert "has the shortest step" not in page


@pytest.mark.parametrize(("forward", "said"), [(1.004e-3, "about the same"), (1.3e-3, "run0 has the shortest step")])
def test_steps_that_differ_by_less_than_chance_are_about_the_same(tmp_path: Path, forward: float, said: str) -> None:
    program = generate("1f1b", num_ranks=2, num_microbatches=4)
    runs = [
        read_run(write_simulated_run(tmp_path / f"run{at}", program, per_stage(seconds, 1e-3), num_steps=5))
        for at, seconds in enumerate((1e-3, forward))
    ]
    page = run_page(reports_of(runs))
    assert said in page
    assert ("has the shortest step" in page) != ("about the same" in page)


def test_bars_of_ranks_share_the_scale_of_the_longest(report: RunReport) -> None:
    steps = [{"rank": rank, "step_seconds": seconds, "idle_share": 0.5} for rank, seconds in enumerate((2.0, 4.0))]
    ranks = [{**step, **dict.fromkeys(PARTS, 0.0), PARTS[0]: step["step_seconds"]} for step in steps]
    assert re.findall(r'width="([0-9.]+)%"', _ranks({"per_rank": ranks})) == ["50.000", "100.000"]
