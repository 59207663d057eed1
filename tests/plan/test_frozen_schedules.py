"""Schedules for a frozen base, F = I and little or no W: search, planner and advice split no backward for nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import frozen_schedules
from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.measured.run import read_run
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.prove.whole import join
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.device.advice import Remedy
from drumline.plan.device.blocks import OpTimes
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.planner import plan
from drumline.plan.search.search import search
from drumline.report.advise.adviser import advise
from drumline.report.run.report import observe
from names import build
from profiles import model_profile
from simulated_runs import per_stage, write_simulated_run
from some import some

MILLI = 1e-3
SMALL = frozen_schedules.SMALL


def splits(program: Program) -> bool:
    return any(part.op is Op.BACKWARD_WEIGHT for part in program.work())


@pytest.mark.parametrize("placement", [Placement.linear(4), Placement.v(4), Placement.loop(4, stages_per_rank=2)])
def test_without_w_the_search_finds_a_proven_program_with_whole_backwards(placement: Placement) -> None:
    limit = Limit(max_activations=placement.num_stages)
    found = search(Costs(backward_weight=0.0), placement, num_microbatches=8, limit=limit, tries=200)
    assert found.gap == 0.0
    assert found.value == 2 * 8 * placement.num_stages / 4 + 2 * 3  # all work of a rank, and the others' once around
    assert not splits(found.program)
    assert validate(found.program, limit=limit) == []


def test_a_w_that_fills_anything_stays_by_itself_in_a_search() -> None:
    costs = Costs(backward_weight=0.04)
    found = search(costs, Placement.linear(4), num_microbatches=8, limit=Limit(max_activations=4), tries=200)
    assert splits(found.program)
    assert found.value < simulate(join(found.program, [True] * 4), costs).makespan


def test_only_stages_without_w_are_joined_in_a_search() -> None:
    costs = Costs(backward_weight=[0.0, 1.0])
    found = search(costs, Placement.linear(2), num_microbatches=4, limit=Limit(max_activations=2), tries=200)
    assert {part.stage for part in found.program.work() if part.op is Op.BACKWARD_WEIGHT} == {1}


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8)])
def test_the_page_has_the_lines_that_the_benchmark_prints(num_ranks: int, num_microbatches: int) -> None:
    text = frozen_schedules.PAGE.read_text(encoding="utf-8").splitlines()
    for line in some(frozen_schedules.lines_of([num_ranks], [num_microbatches])):
        assert line in text


def test_the_table_of_the_page_is_whole_and_no_figure_is_below_its_bound() -> None:
    text = frozen_schedules.PAGE.read_text(encoding="utf-8").splitlines()
    first = text.index("| " + " | ".join(frozen_schedules.HEADER) + " |") + 2
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text[first : first + 28]]
    counts = [(ranks, number) for ranks in range(2, 9) for number in (4, 8, 16, 32)]
    assert [(int(row[0]), int(row[1])) for row in rows] == counts
    for (ranks, number), row in zip(counts, rows, strict=True):
        assert float(row[2]) == ranks
        assert float(row[3]) == pytest.approx(1 + (ranks - 1) / number, abs=6e-4)
        cells = zip((2, 4, 2, 4), (0.0, 0.0, SMALL, SMALL), row[6:8] + row[9:11], strict=True)
        for finer, weight, cell in cells:
            figure, _, bound = cell.rstrip("*)").partition(" (")
            # What the other ranks do with one microbatch before and after, less the W that may fill it.
            least = 1 + (2 * (ranks - 1) / finer - ranks * weight) / (number * (2 + weight))
            assert float(figure) >= float(bound or figure) >= least - 6e-4
            if number >= ranks and finer == 2:
                assert cell.endswith("*")
        assert float(row[11]) >= float(row[10].partition(" ")[0].rstrip("*"))


def profile_of(weight: float, *, split: float) -> ModelProfile:
    """Return eight equal blocks that take 1 forward and 1 back; splitting adds a share to all of it."""
    known = model_profile([1.0] * 8)
    times = OpTimes(1.0, 1.0 + weight, 1.0 + split, weight, 1.0 + split)
    sizes = tuple(
        (rows, replace(sized, layers=tuple(replace(layer, times=times) for layer in sized.layers)))
        for rows, sized in known.sizes
    )
    return replace(known, sizes=sizes)


def test_the_planner_tries_whole_backwards_where_little_trains_and_takes_what_was_measured_to_be_shorter() -> None:
    for weight, split in ((0.04, 0.1), (0.2, 0.0)):  # costs more than it fills; fills and costs nothing
        found = plan(profile_of(weight, split=split), num_ranks=4, batch=16, schedules=["zb-v"], seconds=0.0)
        assert {splits(candidate.program) for candidate in found.candidates} == {False, True}
        assert splits(found.best.program) is (split == 0.0)
        assert found.best.schedule == "zb-v"
    full = plan(profile_of(1.0, split=0.1), num_ranks=4, batch=16, schedules=["zb-v"], seconds=0.0)
    assert {splits(candidate.program) for candidate in full.candidates} == {True}


def remedies(path: Path, program: Program, shares: list[float] | None) -> list[Remedy]:
    costs = per_stage(*[MILLI] * 4)
    plan_of_run: dict[str, Any] = {} if shares is None else {"trained_shares": shares}
    found = advise(observe(read_run(write_simulated_run(path, program, costs, rows=8, **plan_of_run))))
    return [remedy for remedy in found.remedies if remedy.kind == "schedule"]


def test_no_schedule_is_advised_for_splitting_what_is_run_whole(tmp_path: Path) -> None:
    program = build("1f1b", 4, 8)
    (full,) = remedies(tmp_path / "full", program, [1.0] * 4)
    assert full.settings == {"schedule": "zb-h1"}
    assert full.assumes == "assuming that W takes half of B"
    assert [remedy.sentence for remedy in remedies(tmp_path / "unknown", program, None)] == [full.sentence]
    assert remedies(tmp_path / "adapters", program, [0.01] * 4) == []
    (half,) = remedies(tmp_path / "half", program, [0.01, 0.01, 0.5, 0.5])
    assert half.assumes == "assuming that W takes as long as I, times the share of weights that train"
    assert 0 < half.gain < full.gain


def test_a_run_with_whole_backwards_is_known_for_its_schedule(tmp_path: Path) -> None:
    program = join(build("zb-h1", 4, 8), [True] * 4)
    assert remedies(tmp_path / "adapters", program, [0.01] * 4) == []
    mixed = join(build("gpipe", 4, 8), [True] * 4)
    costs = per_stage(*[MILLI] * 4)
    run = write_simulated_run(tmp_path / "gpipe", mixed, costs, rows=8, trained_shares=[0.01] * 4)
    memory = [remedy for remedy in advise(observe(read_run(run))).remedies if remedy.kind == "memory"]
    assert [remedy.settings for remedy in memory] == [{"schedule": "1f1b"}]
