"""What a report advises, on runs whose steps take exactly what they are said to."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from drumline.core.costs import Costs, Edge
from drumline.core.measured.run import read_run
from drumline.core.simulate.simulate import simulate
from drumline.plan.device.advice import Advice, Remedy
from drumline.report.advise.adviser import advise
from drumline.report.run.report import observe
from drumline.schedules import generate
from simulated_runs import even_blocks, per_stage, write_simulated_run

MILLI = 1e-3


def advice(
    path: Path, costs: Costs, *, name: str = "1f1b", ranks: int = 2, microbatches: int = 8, **options: Any
) -> Advice:
    program = generate(name, num_ranks=ranks, num_microbatches=microbatches)
    return advise(observe(read_run(write_simulated_run(path / "run", program, costs, **options))))


def of_kind(found: Advice, kind: str) -> Remedy:
    (remedy,) = [remedy for remedy in found.remedies if remedy.kind == kind]
    return remedy


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_a_slow_stage_is_named_and_following_the_advice_gains_what_was_predicted(tmp_path: Path, slow: int) -> None:
    seconds = [(2 if stage == slow else 1) * MILLI for stage in range(4)]
    found = advice(tmp_path, per_stage(*seconds), ranks=4, microbatches=16, blocks=even_blocks(4, 6))
    assert found.best is not None
    assert found.best.kind == "cut"
    assert found.sentence.startswith(f"Rank {slow} is 100% slower: move block")
    counts = found.best.settings["balance"]
    of_block = [duration / 6 for duration in seconds for _ in range(6)]
    ends = [sum(counts[:stage]) for stage in range(5)]
    followed = [sum(of_block[i:j]) for i, j in pairwise(ends)]
    program = generate("1f1b", num_ranks=4, num_microbatches=16)
    before, after = (simulate(program, per_stage(*each)).makespan for each in (seconds, followed))
    assert found.best.gain == pytest.approx(1 - after / before, abs=1e-6)
    assert found.best.gain > 0.1
    assert "assuming that all blocks of a stage cost the same" in found.sentence


def test_parameters_say_how_a_stage_is_shared_among_its_blocks(tmp_path: Path) -> None:
    guessed = [1, 1, 1, 1, 5, 1]  # the first block of stage 1 is the heavy one
    blocks = [["a", "b", "c"], ["d", "e", "f"]]
    costs = per_stage(3 * MILLI, 7 * MILLI)
    found = of_kind(advice(tmp_path, costs, blocks=blocks, guessed_costs=guessed), "cut")
    assert found.settings == {"balance": [4, 2]}
    assert "move block d to rank 0" in found.sentence
    assert found.assumes == "assuming that a block's cost follows its parameters, on any rank"


def test_with_a_profile_a_rank_that_is_slow_as_a_whole_is_told_from_heavy_blocks(tmp_path: Path) -> None:
    block = {"forward": MILLI, "backward": 2 * MILLI, "backward_input": MILLI, "backward_weight": MILLI}
    plan: dict[str, Any] = {"blocks": even_blocks(2, 6), "predicted": {"blocks": [block] * 12}}
    costs = per_stage(6 * MILLI, 18 * MILLI)  # rank 1 takes three times what its blocks were measured to take
    found = of_kind(advice(tmp_path, costs, microbatches=32, **plan), "cut")
    assert found.settings == {"balance": [9, 3]}  # a block that leaves rank 1 takes a third
    assert found.assumes == ""
    heavy = {name: 3 * seconds for name, seconds in block.items()}
    plan["predicted"] = {"blocks": [block] * 6 + [heavy] * 6}
    found = of_kind(advice(tmp_path, costs, microbatches=32, **plan), "cut")
    assert found.settings == {"balance": [8, 4]}  # it takes as long wherever it is


def test_even_stages_are_left_alone(tmp_path: Path) -> None:
    found = advice(tmp_path, per_stage(MILLI, MILLI), blocks=even_blocks(2, 4))
    assert not [remedy for remedy in found.remedies if remedy.kind == "cut"]


def test_too_few_microbatches_are_told_with_the_number_that_would_do(tmp_path: Path) -> None:
    found = advice(tmp_path, per_stage(*[MILLI] * 4), ranks=4, microbatches=4, blocks=even_blocks(4, 1))
    assert found.best is not None
    assert found.best.settings == {"num_microbatches": 16}
    before = 4 + 3
    after = (16 + 3) / 4
    assert found.best.gain == pytest.approx(1 - after / before, abs=1e-3)
    assert found.sentence.startswith("With 4 microbatches, 43% is bubble: split the batch into 16, predicted -32%")


def test_no_more_microbatches_are_advised_than_the_batch_has_rows(tmp_path: Path) -> None:
    found = advice(tmp_path, per_stage(*[MILLI] * 4), ranks=4, microbatches=4, rows=8)
    assert of_kind(found, "microbatches").settings == {"num_microbatches": 8}


def test_overhead_asks_for_larger_microbatches(tmp_path: Path) -> None:
    costs = per_stage(MILLI / 100, MILLI / 100)
    found = advice(tmp_path, costs, microbatches=16, overhead=MILLI / 10)
    assert found.best is not None
    assert found.best.settings == {"num_microbatches": 4}
    assert "is overhead: split the batch into 4, predicted" in found.sentence


def test_a_slow_link_is_named(tmp_path: Path) -> None:
    costs = per_stage(*[MILLI] * 3)
    slow = Costs(
        forward=costs.forward, backward_input=costs.backward_input, backward_weight=0, edges={(1, 2): Edge(4 * MILLI)}
    )
    link = of_kind(advice(tmp_path, slow, ranks=3, microbatches=6, rows=6), "link")
    assert link.sentence.startswith("A message from rank 1 to rank 2 takes 4 ms, and the step waits for it")
    program = generate("1f1b", num_ranks=3, num_microbatches=6)
    before, after = simulate(program, slow).makespan, simulate(program, costs).makespan
    assert link.gain == pytest.approx((before - after) / before, abs=1e-4)


def test_a_schedule_that_holds_less_in_the_same_time_is_named(tmp_path: Path) -> None:
    found = of_kind(advice(tmp_path, per_stage(*[MILLI] * 4), name="gpipe", ranks=4, microbatches=8), "memory")
    assert found.settings == {"schedule": "1f1b"}
    assert "holds 4 activations, not 8, in the same time" in found.sentence


def test_a_faster_schedule_says_what_it_assumes(tmp_path: Path) -> None:
    found = of_kind(advice(tmp_path, per_stage(*[MILLI] * 4), ranks=4, rows=8), "schedule")
    assert found.settings == {"schedule": "zb-h1"}
    assert found.assumes == "assuming that W takes half of B"
    assert found.gain == pytest.approx(1 - 27 / 33, abs=1e-3)


def test_time_outside_of_steps_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    advice(tmp_path, per_stage(MILLI, MILLI))
    text = (path / "metrics.jsonl").read_text()
    text = text.replace('"pp/bubble"', '"pp/rank0/data_seconds":0.5,"pp/rank0/update_seconds":0.4,"pp/bubble"')
    (path / "metrics.jsonl").write_text(
        text.replace('"time_metrics/end_to_end(s)":0.0', '"time_metrics/end_to_end(s)":1.0')
    )
    found = of_kind(advise(observe(read_run(path))), "outside")
    assert found.sentence.startswith("97% of the time from step to step is outside the step, ")
    assert found.sentence.endswith(" on rank 0: waiting for data 500 ms, the optimizer 400 ms")


def test_where_nothing_gains_the_advice_says_so() -> None:
    assert Advice(()).sentence == "No change that was tried is predicted to gain 1% or more."
    sure, unsure = Remedy("cut", "sure", 0.05), Remedy("link", "unsure", 0.08, assumes="if the moon is full")
    assert sure.weight > unsure.weight
