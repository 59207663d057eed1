"""`optimizer.validated = "after"`: a run that does not wait before its updates is the same run to the last bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from attached import validation_of
from drumline.core.errors import ConfigError
from drumline.features.validated.validated import Validation
from drumline.pipeline.pipeline import Pipeline
from drumline.train.config.files.settings_file import read_settings
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    EvaluationSettings,
    OptimizerSettings,
    PrecisionSettings,
    RunSettings,
)
from drumline.train.dry.dry_run import dry_run
from drumline.train.loop.evaluate import Evaluation
from drumline.train.loop.optimizers import Optimizers
from drumline.train.loop.progress import Update
from drumline.train.loop.stopping import SkippedUpdate
from refused import refused
from some import some
from stand_in_run import arguments, batch, gpt, stand_in
from train.test_skipping import BAD, MUON, ROWS, left_out, saved, settings_for, trained

pytestmark = [pytest.mark.torch, pytest.mark.features("check", "precision", "record", "validated")]

AFTER = OptimizerSettings(lr=1e-2, groups=(MUON,), validated="after", clip_norm=0.3)


def ahead() -> Any:
    """Let ranks of one process update although their own norms speak against it, as if others had the large ones."""
    return mock.patch.object(Validation, "_may_stand", return_value=True)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return what the run folder has of every step, without times and bytes."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss_metrics/global_avg_loss", "grad_norm", "train/step", "train/loss", "lr", "n_tokens_seen")
    return [{key: value.get(key) for key in kept} for value in found]


@pytest.mark.features("capture", "lengths", "saving", "stream")
@pytest.mark.parametrize(
    "tables",
    [
        {"batch": BatchSettings(sequences=2 * ROWS, microbatch=2, sequence=1, accumulate=2)},
        {"checkpoint": CheckpointSettings(every=2), "evaluation": EvaluationSettings(every=3)},
    ],
    ids=["accumulated", "paused"],
)
def test_a_clipped_run_is_the_same_in_all_that_it_tells_and_saves(tmp_path: Path, tables: dict[str, Any]) -> None:
    results: list[list[Any]] = []
    for validated in ("before", "after"):
        told: list[Any] = []
        folder = tmp_path / validated
        given = settings_for(folder, optimizer=replace(AFTER, validated=validated), **tables)
        with ahead():
            found = trained(given, {}, told.append)
        updates = [(item.step, item.loss, item.lr, item.grad_norm) for item in told if isinstance(item, Update)]
        order = [(type(update), update.step) for update in told if isinstance(update, Update | Evaluation)]
        counts = found.num_tokens, found.num_skipped
        results.append([found.losses, found.grad_norms, counts, updates, order, lines(folder), saved(folder)])
    *plain, wanted = results[0]
    *ours, state = results[1]
    assert ours == plain
    assert max(ours[1]) > AFTER.clip_norm > 0
    for name, entry in some(state.items()):
        assert torch.equal(entry, wanted[name]), name


@pytest.mark.features("capture", "lengths", "saving", "stream")
@pytest.mark.parametrize("precision", [PrecisionSettings(), PrecisionSettings(weights="bf16", master_weights=True)])
def test_an_update_with_a_nan_is_left_out_and_told_of(tmp_path: Path, precision: PrecisionSettings) -> None:
    told: list[Any] = []
    given = settings_for(tmp_path / "nan", optimizer=replace(AFTER, clip_norm=1e3), precision=precision)
    with ahead():
        found = trained(given, {BAD: "target"}, told.append)
    assert found.num_skipped == 1
    assert [update.step for update in told if isinstance(update, SkippedUpdate)] == [BAD + 1]
    waits = replace(given, optimizer=replace(given.optimizer, validated="before"))
    wanted = left_out(replace(waits, run=RunSettings(steps=5, out=str(tmp_path / "plain"))), BAD)
    state = saved(tmp_path / "nan")
    for name, value in some(wanted.items()):
        if not name.startswith("random"):
            assert torch.equal(value, state[name]), name


def test_a_dry_run_counts_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    small: dict[str, Any] = {"model.num_layers": 2, "model.hidden": 16, "model.num_heads": 2, "batch.sequence": 8}
    small |= {"batch.microbatch": 2, "batch.sequences": 8, "pipeline.device": "cpu", "pipeline.check_model": False}
    waits, runs = (read_settings(None, {**small, "optimizer.validated": name}) for name in ("before", "after"))
    before, after = (sum(rank.optimizer for rank in dry_run(given).forecast.ranks) for given in (waits, runs))
    built = gpt(runs)
    given = batch(runs, built)
    how = arguments(runs, built, given, Path()) | {"record": True, "transport": "in-process"}
    with Pipeline(built.model, **how) as pipe:
        optimizers = Optimizers(pipe, runs.optimizer)
        for _ in range(2):
            pipe.step(given.inputs["input"], target=given.target)
            optimizers.step()
            optimizers.zero_grad()
        kept = validation_of(pipe).num_bytes
    assert after - before == kept > before


def test_what_cannot_be_validated_afterwards_is_refused_with_its_key() -> None:
    cases = {"precision.compute": "fp16", "pipeline.capture": True, "mesh.tensor": 2}
    for key, value in cases.items():
        with refused(ConfigError, r'optimizer.validated.*is "after", and'):
            read_settings(None, {"optimizer.validated": "after", key: value})
    with refused(ConfigError, "optimizer.validated is 'never'", expected='"before" or "after"'):
        read_settings(None, {"optimizer.validated": "never"})
