"""Searched programs among the candidates of a cluster: counted like schedules, within the limit, written for a run."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_models import GIB, small_cluster, small_transformer
from drumline.cli.main import main
from drumline.core.errors import PlanError
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.stages import layer_counts
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.explain import brief, drawing
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import ClusterPlan, plan
from drumline.plan.layouts.preference import BAND, band
from drumline.plan.layouts.program_search import MOST_PAIRS, costs_of, estimate_of, searched
from drumline.report.plan.text import plan_text
from drumline.schedules import find
from refused import refused
from some import some

GPT = small_transformer()
PLAIN = Pins(tensor=1, pipeline=4, data=1, microbatch=1, zero=0, recompute="none", schedules=("1f1b",))


def planned(seconds: float, pins: Pins = PLAIN, memory: float = 8 * GIB) -> ClusterPlan:
    return plan(GPT, small_cluster(4, memory=memory), batch=8, pins=pins, search_seconds=seconds)


def staged(schedule: str, per_rank: int, **changes: object) -> Layout:
    counts = layer_counts(GPT, 4, schedule, per_rank)
    plain = Layout(batch=8, pipeline=4, schedule=schedule, stages_per_rank=per_rank, counts=counts)
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layout",
    [
        staged("1f1b", 1),
        staged("interleaved-1f1b", 3, recompute="full"),
        staged("zb-h1", 1, recompute="selective"),
        staged("zb-v", 2),
        staged("1f1b", 1, tensor=2, sequence_parallel=True),
    ],
)
def test_the_program_of_a_schedule_counts_as_the_schedule_does(layout: Layout) -> None:
    machines = small_cluster(layout.num_devices)
    start = Choice(layout, estimate(GPT, machines, layout, exact=True), is_exact=True)
    own = find(layout.schedule).build(layout.pipeline, layout.num_microbatches, layout.stages_per_rank)
    again = estimate_of(GPT, machines, start, own, costs_of(GPT, machines, layout))
    assert again.seconds.total == pytest.approx(start.seconds)
    assert again.bubble == pytest.approx(start.estimate.bubble)
    # Stages of a rank may differ, and the estimate takes their mean.
    assert again.bytes.total == pytest.approx(start.bytes, rel=0.05 if layout.stages_per_rank > 1 else 1e-9)


def test_messages_hide_behind_the_weights_gradients_of_whole_backwards_only() -> None:
    machines = small_cluster(8)
    for schedule, is_split in (("1f1b", False), ("zb-h1", True)):
        costs = costs_of(GPT, machines, staged(schedule, 1, tensor=2, sequence_parallel=True))
        halves = (costs.per_stage(name, 4) for name in ("backward_input", "backward_weight"))
        both, whole = [sum(pair) for pair in zip(*halves, strict=True)], costs.per_stage("backward", 4)
        assert (both == pytest.approx(whole)) == is_split
        assert all(some(more >= less * (1 - 1e-9) for more, less in zip(both, whole, strict=True)))


def test_a_program_that_is_faster_is_chosen_and_proven() -> None:
    without, found = planned(0.0), planned(10.0)
    chosen, program = found.chosen, found.chosen.program
    assert without.chosen.program is None
    assert without.searched == ()
    assert program is not None
    assert not validate(program)
    assert chosen.seconds < without.chosen.seconds / (1 + BAND)
    assert chosen.bytes <= found.limit_bytes
    costs = costs_of(GPT, found.cluster, chosen.layout)
    drawn = drawing(GPT, found.cluster, chosen.layout, program)
    assert drawn is not None
    assert drawn.timeline.makespan == simulate(program, costs).makespan
    told = brief(found)
    figures = json.loads(json.dumps(told.to_json()))
    assert (figures["chosen"]["schedule"], figures["searched"][0]["start"]) == ("searched", "1f1b")
    assert figures["searched"][0]["gain"] == pytest.approx(1 - chosen.seconds / without.chosen.seconds)
    assert Program.parse("\n".join(figures["searched"][0]["program"])).rows == program.rows
    text = " ".join(plan_text(told, width=200).split())
    assert "a searched program on the stages of 1f1b" in text
    assert "--launch torchtitan" not in text
    assert [config.framework for config in told.launch.configs] == ["drumline"]


@pytest.mark.parametrize(("faster", "is_searched"), [(0.5 * BAND, False), (2 * BAND, True)])
def test_a_schedule_as_fast_as_a_forecast_can_tell_is_preferred(faster: float, is_searched: bool) -> None:
    layout = staged("zb-h1", 1)
    start = Choice(layout, estimate(GPT, small_cluster(4), layout, exact=True), is_exact=True)
    less = replace(start.estimate.seconds, bubble=start.estimate.seconds.bubble - faster * start.seconds)
    program = find("zb-h1").build(4, 8, 1)
    found = replace(start, estimate=replace(start.estimate, seconds=less), program=program)
    assert (band([start, found], 8 * GIB)[0].program is not None) == is_searched


def test_a_search_keeps_within_the_memory_of_a_device() -> None:
    machines, layout = small_cluster(4), staged("1f1b", 1, recompute="full")
    start = Choice(layout, estimate(GPT, machines, layout, exact=True), is_exact=True)
    roomy, tight = (searched(GPT, machines, [start], limit, 1.0)[0] for limit in (8 * GIB, start.bytes))
    assert tight.choice.bytes <= start.bytes * (1 + 1e-9)
    assert roomy.choice.seconds < tight.choice.seconds < start.seconds
    assert searched(GPT, machines, [start], start.bytes / 4, 1.0) == []


def test_what_is_too_large_or_has_no_order_to_search_is_left_out() -> None:
    machines = small_cluster(4)
    long = staged("1f1b", 1, batch=MOST_PAIRS // 4 + 1)
    mirrored = staged("dualpipe", 1)
    alone = Layout(batch=8, data=4, counts=(12,))
    every = [Choice(layout, estimate(GPT, machines, layout)) for layout in (long, mirrored, alone)]
    assert searched(GPT, machines, every, 64 * GIB, 1.0) == []


def test_searching_is_refused_where_it_makes_no_sense() -> None:
    for framework in ("megatron", "torchtitan"):
        pins = Pins(framework=framework)
        with refused(PlanError, f"{framework} does not run searched programs"):
            plan(GPT, small_cluster(4), batch=8, pins=pins, search_seconds=1.0)
    for seconds in (-1.0, float("inf"), float("nan")):
        with refused(PlanError, "seconds to search"):
            planned(seconds)


def test_the_config_names_the_program_that_is_written_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = "plan gpt-1.7b --hardware a100-80 --gpus 4 --batch 8 --brief --tensor 1 --pipeline 4 --recompute none"
    asked += " --microbatch 1 --search 5"
    assert main([*asked.split(), "--schedules", "1f1b", "--out", "run.toml"]) == 0
    said = capsys.readouterr().out
    assert all(some(f"wrote {name}" in said for name in ("run.toml", "run.csv")))
    written = tomllib.loads(Path("run.toml").read_text(encoding="utf-8"))["pipeline"]
    assert written["schedule"] == "run.csv"
    program = Program.load("run.csv")
    assert (program.num_ranks, program.num_microbatches, len(written["layers"])) == (4, 8, program.num_stages)
    assert main([*asked.replace("--search 5", "").split(), "--schedules", "1f1b", "--out", "other.csv"]) == 2
    assert "the plan runs the schedule 1f1b" in capsys.readouterr().err
