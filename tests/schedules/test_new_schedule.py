"""Registering a recipe is all that a new schedule takes: everything else finds it by its name."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_models import small_cluster, small_transformer
from drumline.cli.main import main
from drumline.core.action import Action, F, I, W
from drumline.core.costs import Costs
from drumline.core.lower.torch_text import for_torch, titan_schedule
from drumline.core.program import Program
from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.stages import num_sides, pairs_held, stages_of
from drumline.plan.device.planner import plan
from drumline.plan.launch.titan import titan
from drumline.plan.layouts.pins import Degrees, Pins
from drumline.plan.layouts.space import schedules_of
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.objective import Objective
from drumline.plan.search.starts import starts
from drumline.schedules import find, generate, schedule, schedules, unregister
from profiles import model_profile
from some import some

SRC = Path(__file__).parents[2] / "src" / "drumline"


def waltz(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
    """Run two stages per rank in a V, microbatch by microbatch, and all weight halves at the end."""
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        row = [op for m in range(num_microbatches) for op in (F(down, m), F(up, m), I(up, m), I(down, m))]
        yield row + [W(stage, m) for m in range(num_microbatches) for stage in (up, down)]


def upstream(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
    """Run all forwards, then all backwards, from the last rank to the first."""
    for rank in range(num_ranks):
        stage = num_ranks - 1 - rank
        yield [op(stage, m) for ops in ((F,), (I, W)) for m in range(num_microbatches) for op in ops]


@pytest.fixture(params=["waltz", "upstream"])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    stages = {"waltz": 2, "upstream": 1}[request.param]
    recipe = {"waltz": waltz, "upstream": upstream}[request.param]
    schedule(request.param, stages_per_rank=stages, planned_with=(stages,))(recipe)
    yield request.param
    unregister(request.param)


def made(name: str) -> Program:
    return generate(name, num_ranks=2, num_microbatches=4)


def test_its_facts_are_read_off_its_rows(name: str) -> None:
    recipe = find(name)
    assert recipe.placement == {"waltz": "v", "upstream": "custom"}[name]
    assert (recipe.flushed, recipe.trains, recipe.splits_backward, recipe.two_directions) == (True, True, True, False)
    assert recipe.layout(2, recipe.stages_per_rank) == made(name).placement


def test_it_is_shown_and_compared(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = ["--ranks", "2", "--microbatches", "4"]
    assert main(["show", name, *counts]) == 0
    assert "rank 1" in capsys.readouterr().out
    assert main(["compare", *counts, "--json"]) == 0
    assert name in [row["schedule"] for row in json.loads(capsys.readouterr().out)["rows"]]


def test_a_search_starts_from_it(name: str) -> None:
    instance = Instance(Costs(), made(name).placement, 4)
    assert name in [start.name for start in starts(instance, Objective(instance))]


def test_a_profile_is_planned_with_it(name: str) -> None:
    profile = model_profile([1.0, 2.0, 1.0, 2.0])
    found = plan(profile, num_ranks=2, batch=4, seconds=0.0)
    assert name in {candidate.program.name for candidate in (*found.candidates, *found.rejected)}
    assert (
        plan(profile, num_ranks=2, batch=4, seconds=0.0, schedules=[name]).best.program.placement
        == made(name).placement
    )


def test_a_cluster_is_planned_with_it(name: str) -> None:
    transformer, stages, placement = small_transformer(), find(name).stages_per_rank, made(name).placement
    assert (name, stages) in schedules_of(transformer, Degrees(pipeline=2), 4, Pins())
    assert (name, stages) in schedules_of(transformer, Degrees(pipeline=2), 4, Pins(schedules=(name,)))
    assert [[stage for stage, _ in stages_of(name, rank, 2, stages)] for rank in range(2)] == [
        list(placement.stages_of(rank)) for rank in range(2)
    ]
    assert [stages_of(name, rank, 2, stages)[0][0] for rank in range(2)] == [
        placement.stages_of(rank)[0] for rank in (0, 1)
    ]
    assert [num_sides(name, stage, 2, 2 * stages) for stage in (0, 2 * stages - 1)] == [1, 1]
    assert [pairs_held(name, rank, 2, 4, stages) for rank in (0, 1)] == [4 * stages] * 2
    layout = Layout(
        batch=4, pipeline=2, schedule=name, stages_per_rank=stages, counts=(12 // (2 * stages),) * 2 * stages
    )
    assert estimate(transformer, small_cluster(2), layout).seconds.total > 0
    file, missing = titan(transformer, layout)
    assert file["parallelism"]["pipeline_parallel_schedule_csv"] == f"{name}.csv"
    assert any("the placement" in word for word in missing) == (name == "upstream")


@pytest.mark.features("check", "record")
@pytest.mark.torch
def test_it_runs_with_the_gradients_of_one_process(name: str) -> None:
    from drumline.verification.verify import verify

    assert verify(name, num_ranks=2, num_microbatches=4, transport="in-process").passes


def test_it_is_exported(name: str) -> None:
    assert Program.parse(for_torch(made(name))).rows == made(name).rows
    if name == "waltz":
        assert titan_schedule(made(name)) == "ZBVZeroBubble"


def test_a_recipe_that_refuses_small_counts_has_no_facts_and_hurts_nobody() -> None:
    @schedule("picky")
    def picky(num_ranks: int, *, num_microbatches: int) -> list[list[Action]]:
        raise ValueError(num_microbatches)

    try:
        item = find("picky")
        assert (item.placement, item.flushed, item.trains, item.splits_backward) == ("custom", True, True, False)
        assert plan(model_profile([1.0, 2.0]), num_ranks=2, batch=4, seconds=0.0).best.program.name != "picky"
    finally:
        unregister("picky")


# Names in quotes outside of `schedules`: defaults that a signature or flag shows, what was run or the demo runs, and an
# example.
QUOTED = {
    "cli/verify.py": {"1f1b"},
    "core/simulate/simulate.py": {"1f1b"},
    "engine/stages/balance.py": {"1f1b"},
    "features/stream/together.py": {"1f1b"},
    "verification/verify.py": {"1f1b"},
    "plan/cluster/layout.py": {"1f1b"},
    "plan/cluster/published.py": {"1f1b", "interleaved-1f1b"},
    "plan/cluster/stages.py": {"1f1b"},
    "plan/slices/lengths_search.py": {"1f1b", "interleaved-1f1b"},  # what a result is compared with
    "report/explore.py": {"zb-h1"},
    "train/demo.py": {"1f1b", "gpipe", "zb-h1"},
}


def test_no_schedule_is_named_outside_of_the_registry() -> None:
    quoted = re.compile("|".join(f"[\"']{name}[\"']" for name in schedules()))
    for path in some(SRC.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if SRC / "schedules" not in path.parents and quoted.search(source):
            allowed = QUOTED.get(path.relative_to(SRC).as_posix(), set())
            named = {name for text in _texts(source) for name in schedules() if name in (text, *_quoted(text))}
            assert named <= allowed, f"{path} names {sorted(named - allowed)}"


def _quoted(text: str) -> list[str]:
    return re.findall(r"""["']([^"' ]+)["']""", text)


def _texts(source: str) -> Iterator[str]:
    """Yield every text of a module but its docstrings."""
    for node in ast.walk(ast.parse(source)):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str) and not isinstance(node, ast.Expr):
                yield child.value
