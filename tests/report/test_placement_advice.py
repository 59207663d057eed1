"""Advice to place other stages on the ranks, on runs whose blocks are known: a third of them hold experts."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from drumline.core.costs import Costs
from drumline.core.measured.run import read_run
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.plan.device.advice import Advice, Remedy
from drumline.report.advise.adviser import advise
from drumline.report.run.report import observe
from drumline.schedules import generate
from simulated_runs import write_simulated_run
from some import some

MILLI = 1e-3
PLAIN = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0, "taped": 1.0}
SPARSE = {"forward": 3.0, "backward": 6.0, "backward_input": 3.0, "backward_weight": 6.0, "taped": 3.0}
EXPERTS = [PLAIN] * 16 + [SPARSE] * 8
Blocks = list[dict[str, float]]


def costs_of(blocks: Blocks, counts: tuple[int, ...], *, whole: bool = False) -> Costs:
    """Return what stages take, summed over their blocks; with `whole`, as a run without split backwards tells."""
    ends = [sum(counts[:stage]) for stage in range(len(counts) + 1)]

    def each(name: str) -> list[float]:
        return [MILLI * sum(block[name] for block in blocks[i:j]) for i, j in pairwise(ends)]

    if whole:
        return Costs(forward=each("forward"), backward_input=each("backward"), backward_weight=0.0)
    return Costs(
        forward=each("taped"),
        backward=each("backward"),
        backward_input=each("backward_input"),
        backward_weight=each("backward_weight"),
    )


def step(program: Program, blocks: Blocks, counts: tuple[int, ...]) -> float:
    whole = all(part.op.name != "BACKWARD_INPUT" for part in program.work())
    return simulate(program, costs_of(blocks, counts, whole=whole)).makespan


def named(name: str, stages_per_rank: int, *, microbatches: int = 8) -> Program:
    return generate(name, num_ranks=2, num_microbatches=microbatches, stages_per_rank=stages_per_rank)


def _timed(blocks: Blocks) -> list[dict[str, Any]]:
    return [{"name": "", **{name: MILLI * seconds for name, seconds in block.items()}} for block in blocks]


def advice(path: Path, blocks: Blocks, counts: tuple[int, ...], *, timed: bool = True, **options: Any) -> Advice:
    names = [[str(at) for at in range(sum(counts[:s]), sum(counts[: s + 1]))] for s in range(len(counts))]
    plan: dict[str, Any] = {"predicted": {"blocks": _timed(blocks)}} if timed else {}
    run = write_simulated_run(
        path / "run", named("1f1b", 1), costs_of(blocks, counts, whole=True), blocks=names, **plan, **options
    )
    return advise(observe(read_run(run)))


def placements(found: Advice) -> list[Remedy]:
    return [remedy for remedy in found.remedies if remedy.kind == "placement"]


def test_two_stages_per_rank_divide_experts_more_evenly_and_gain_what_was_predicted(tmp_path: Path) -> None:
    found = advice(tmp_path, EXPERTS, (18, 6))
    (remedy,) = placements(found)
    assert found.best == remedy
    assert remedy.assumes == ""
    now = step(named("1f1b", 1), EXPERTS, (18, 6))
    settings = dict(remedy.settings)
    counts = tuple(settings.pop("balance"))
    assert settings["stages_per_rank"] > 1
    followed = step(named(settings["schedule"], settings["stages_per_rank"]), EXPERTS, counts)
    assert remedy.gain == pytest.approx(1 - followed / now, abs=1e-6)
    assert remedy.gain > 0.08
    interleaved = named("interleaved-1f1b", 2)
    cuts = (tuple(b - a for a, b in pairwise((0, *ends, 24))) for ends in combinations(range(1, 24), 3))
    assert followed <= 1.01 * min(step(interleaved, EXPERTS, cut) for cut in cuts)


def test_a_placement_is_for_the_set_up_and_says_what_more_it_holds(tmp_path: Path) -> None:
    (remedy,) = placements(advice(tmp_path, EXPERTS, (18, 6)))
    per_rank, balance = remedy.settings["stages_per_rank"], remedy.settings["balance"]
    pairs = 2 + 2 * (per_rank - 1) + 1  # of an interleaved program on two ranks: warm-up, and the one that runs
    assert remedy.sentence == (
        f"At set-up, place {per_rank} stages on every rank (schedule='interleaved-1f1b', stages_per_rank={per_rank}, "
        f"balance={balance}), predicted {-remedy.gain:+.0%}, "
        f"holding activations of {pairs / per_rank:g} microbatches instead of 2"
    )


@pytest.mark.parametrize(("weight", "splits"), [(2.0, False), (0.5, True)])
def test_split_backwards_are_advised_only_where_blocks_say_that_they_pay(
    tmp_path: Path, weight: float, splits: bool
) -> None:
    blocks = [{**block, "backward_weight": weight * block["backward_weight"]} for block in EXPERTS]
    found = advice(tmp_path, blocks, (18, 6))
    advised = [remedy.settings["schedule"] for remedy in found.remedies if "schedule" in remedy.settings]
    assert advised
    assert any(name.startswith("zb-") for name in advised) is splits
    with_schedules = some(remedy for remedy in found.remedies if "schedule" in remedy.settings)
    assert all(remedy.assumes == "" for remedy in with_schedules)
    for remedy in some(found.remedies):
        if remedy.kind == "schedule":
            taken = step(named(remedy.settings["schedule"], 1), blocks, (18, 6))
            assert remedy.gain == pytest.approx(1 - taken / step(named("1f1b", 1), blocks, (18, 6)), abs=1e-6)


def test_without_timed_blocks_no_placement_is_advised(tmp_path: Path) -> None:
    guessed = [block["forward"] for block in EXPERTS]
    assert not placements(advice(tmp_path, EXPERTS, (18, 6), timed=False, guessed_costs=guessed))


def test_the_executors_time_of_every_action_counts_against_more_stages(tmp_path: Path) -> None:
    assert not placements(advice(tmp_path, EXPERTS, (18, 6), overhead=20 * MILLI))


@pytest.mark.parametrize("what", [{"trained_shares": [1.0, 0.5]}, {"checkpoint": [["0"], []]}])
def test_what_timed_blocks_do_not_describe_gets_no_other_placement(tmp_path: Path, what: dict[str, Any]) -> None:
    assert not placements(advice(tmp_path, EXPERTS, (18, 6), **what))
