"""Runs whose sequences are divided into slices: the losses of runs without, also when another division goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.channel.launch.launch import launch
from drumline.core.errors import ConfigError
from drumline.pipeline.pipeline import Pipeline
from drumline.plan.device.model_profile import Identity
from drumline.plan.device.plan import Plan, RankBytes, StepSeconds
from drumline.schedules import generate
from drumline.train.config.files.settings_file import read_settings
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    EvaluationSettings,
    MeshSettings,
    ModelSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.data.build import build_data
from drumline.train.data.example import example_of
from drumline.train.dry.dry_run import dry_run
from drumline.train.loop.making import build, pipeline_arguments
from drumline.train.loop.run import run_training
from drumline.train.loop.training import TrainResult
from drumline.train.models.build import build_model
from drumline.train.replan import planned_for
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("check", "record", "saving", "slices")]


def trained(folder: Path, slices: Any, *, resume: Path | None = None, steps: int = 4, **tables: Any) -> TrainResult:
    settings = TrainSettings(
        model=ModelSettings(num_layers=2, hidden=16, num_heads=2, dropout=0.1),
        batch=BatchSettings(sequences=4, microbatch=2, sequence=24),
        pipeline=PipelineSettings(transport="in-process", device="cpu", slices=slices),
        evaluation=EvaluationSettings(every=2, batches=1),
        checkpoint=CheckpointSettings(every=2, keep=9, resume="" if resume is None else str(resume)),
        run=RunSettings(steps=steps, out=str(folder)),
    )
    return run_training(replace(settings, **tables), tell=lambda told: None)


@pytest.mark.slow
def test_a_run_goes_on_in_other_slices_as_it_would_have_gone_on_in_none(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 1, evaluation=EvaluationSettings(every=2, batches=1, sample_every=4))
    sampling = EvaluationSettings(every=2, batches=1, sample_every=4, sample_tokens=3)
    divided = trained(tmp_path / "divided", 4, evaluation=sampling)
    assert divided.losses == pytest.approx(whole.losses, rel=1e-5)
    assert divided.losses != whole.losses  # sums have another order
    assert [each.loss for each in divided.evaluations] == pytest.approx(
        [each.loss for each in whole.evaluations], rel=1e-5
    )
    assert len(divided.samples) == 1
    for number, slices in enumerate([(11, 7, 6), 1]):
        saved = tmp_path / "divided" / "checkpoints" / "step-00000002"
        after = trained(tmp_path / f"after-{number}", slices, resume=saved)
        assert (after.first_step, len(after.losses)) == (2, 2)
        assert after.losses == pytest.approx(divided.losses[2:], rel=1e-5)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "not a multiple": ({"pipeline.slices": 5}, "a multiple of pipeline.slices, 5"),
    "other lengths": ({"pipeline.slices": [8, 8, 4]}, "give a number of slices"),
    "documents side by side": ({"pipeline.slices": 4, "lengths.how": "packed"}, "pipeline.slices = 1"),
    "lines with parts": ({"pipeline.slices": 4, "mesh.context": 2}, "pipeline.slices = 1"),
    "no flush": ({"pipeline.slices": 4, "pipeline.schedule": "pipedream"}, "use 1f1b"),
    "captured": ({"pipeline.slices": 4, "pipeline.capture": True}, "pipeline.slices = 1"),
    "adapting": ({"pipeline.slices": 4, "adapt.on": True}, "pipeline.slices = 1"),
    "no slices": ({"pipeline.slices": 0}, "2 at least"),
    "slices of one token": ({"pipeline.slices": [23, 1]}, "2 at least"),
    "points": ({"pipeline.slices": 2, "model.kind": "mlp"}, "points have no sequence"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_slices_do_not_go_with_is_refused_before_anything_starts(kind: str) -> None:
    given, what = WRONG[kind]
    with pytest.raises(ConfigError) as error:
        read_settings(None, {"batch.sequence": 24, **given})
    assert what in str(error.value)


def test_a_dry_run_counts_slices_of_activations() -> None:
    given = {"batch.sequence": 32, "batch.sequences": 8, "batch.microbatch": 2, "model.num_layers": 4,
             "model.hidden": 32, "model.num_heads": 2, "pipeline.device": "cpu"}  # fmt: skip
    whole, divided = (dry_run(read_settings(None, {**given, "pipeline.slices": slices})) for slices in (1, 4))
    assert (divided.summary()["microbatches"], divided.summary()["slices"]) == (4, 4)
    assert divided.forecast.ranks[0].activations < 0.7 * whole.forecast.ranks[0].activations
    assert divided.forecast.ranks[0].working < 0.5 * whole.forecast.ranks[0].working
    assert divided.forecast.program.num_units == 4 * whole.forecast.program.num_units


def test_what_a_plan_divides_is_judged_and_stays_divided_on_fewer_ranks(tmp_path: Path) -> None:
    whole = generate("zb-h1", num_ranks=4, num_microbatches=2, slices=3)
    seconds, held = StepSeconds(*[1.0] * 6), RankBytes(*[0.0] * 5)
    made = Plan(Identity("GPT", 0, ""), whole, (1,) * 4, ("b", "c", "d"), 4, 2, (False,) * 4, seconds, (held,) * 4,
                slices=(11, 7, 6))  # fmt: skip
    made.save(tmp_path / "plan.json")
    four = TrainSettings(
        mesh=MeshSettings(pipeline=4), batch=BatchSettings(sequences=4, microbatch=2, sequence=24),
        pipeline=PipelineSettings(plan=str(tmp_path / "plan.json")),
    )  # fmt: skip
    three = planned_for(four, 3, quiet=True).pipeline
    assert (three.schedule, three.slices, three.plan) == ("zb-h1", (11, 7, 6), "")
    with pytest.raises(ConfigError) as error:
        read_settings(None, {"pipeline.plan": four.pipeline.plan, "batch.sequence": 32, "mesh.pipeline": 4,
                             "batch.sequences": 4, "batch.microbatch": 2})  # fmt: skip
    assert "has slices of 24 tokens in all" in str(error.value)


def _held(cases: list[TrainSettings]) -> list[float]:
    """Return what this rank held for backwards at its fullest moment of a step of each case, weighed."""
    found: list[float] = []
    for settings in cases:
        built = build(settings, build_model, whole=True)
        data = build_data(settings, built, rank=0, size=1)
        example = example_of(data, settings.num_microbatches)
        data.close()
        how = pipeline_arguments(settings, built, example, Path()) | {"record": True, "weigh": True}
        with Pipeline(built.model, **how) as pipe:
            assert pipe.step(**example.inputs, target=example.target).loss is not None
            found.append(max(pipe.timeline().records[pipe.rank].peaks))
    return found


@pytest.mark.slow
def test_a_dry_run_counts_gradients_of_keys_and_values_as_ranks_hold_them() -> None:
    given = {"batch.sequence": 32, "batch.sequences": 8, "batch.microbatch": 2, "model.num_layers": 4,
             "model.hidden": 32, "model.num_heads": 2, "pipeline.device": "cpu", "pipeline.check_model": False,
             "pipeline.slices": 8, "mesh.pipeline": 2}  # fmt: skip
    cases = [
        read_settings(None, given | more)
        for more in ({}, {"pipeline.schedule": "zb-h1"}, {"memory.recompute": "full", "pipeline.slices": [20, 12]})
    ]
    held = launch(_held, cases, num_ranks=2)
    for number, settings in enumerate(cases):
        for rank, told in enumerate(some(dry_run(settings).forecast.ranks)):
            assert told.activations == pytest.approx(held[rank][number], rel=0.005)
