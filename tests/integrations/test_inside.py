"""What a pipeline offers besides steps, inside of a trainer: timelines, recorded runs, adapting, precision, lines."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import drumline as dl
from extras import needed
from integrations.cases import Making, Outcome, outcome
from integrations.models import small, texts
from integrations.test_trainer import differences
from matrices import long
from some import some

transformers: Any = needed("transformers", extra="hf")
from drumline.core.timeline.idle import Cause  # noqa: E402
from drumline.integrations.transformers import Trainer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
IN_PROCESS = {"num_ranks": 2, "transport": "in-process", "check_model": False}


def both(folder: Path, **settings: Any) -> tuple[Making, Making]:
    """Return what makes trainers of transformers alone, and on a pipeline."""
    mine = Making(Trainer, folder / "mine", folder, {**IN_PROCESS, **settings})
    return mine, Making(transformers.Trainer, folder / "theirs", folder)


@pytest.mark.features("record")
def test_the_log_has_the_bubble_and_its_causes_and_a_recorded_run_has_every_step(tmp_path: Path) -> None:
    mine, theirs = both(tmp_path, record=str(tmp_path / "run"))
    trainer, plain = mine(small(), logging_steps=2, max_steps=4), theirs(small(), logging_steps=2, max_steps=4)
    trainer.train()
    plain.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry in logged:
        causes = {name: value for name, value in entry.items() if name.startswith("pipeline_idle_")}
        assert causes.keys() <= {f"pipeline_idle_{cause.value}" for cause in Cause}
        assert 0 < entry["pipeline_bubble"] < 1
        assert sum(causes.values()) == pytest.approx(entry["pipeline_bubble"], abs=1e-6)
    assert [entry["step"] for entry in logged] == [2, 4]
    assert differences(outcome(trainer), outcome(plain)) == []
    trainer.pipeline.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4


class Moves(transformers.TrainerCallback):
    """Moves layers to the other rank after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            first, second = (len(names) for names in self.trainer.pipeline.blocks)
            self.trainer.pipeline.repartition(balance=[first - 1, second + 1])


@pytest.mark.features("adapt", "moving")
def test_layers_that_move_take_their_state_along_and_are_saved(tmp_path: Path) -> None:
    mine, theirs = both(tmp_path, adapt={"program": False})
    moves = Moves()
    given: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 5, "weight_decay": 0.1}
    moves.trainer = trainer = mine(small(4), callbacks=[moves], **given)
    plain = theirs(small(4), **given)
    trainer.train()
    plain.train()
    assert len(trainer.pipeline.moves) >= 1
    assert differences(outcome(trainer), outcome(plain)) == []
    saved, wanted = (torch.load(make.folder / "out" / "checkpoint-5" / "optimizer.pt") for make in (mine, theirs))
    assert differences(saved, wanted) == []


@pytest.mark.parametrize("said_by", ["argument", "accelerate launch"])
def test_bf16_predicts_what_one_process_predicts_and_trains_within_its_rounding(
    said_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said_by == "accelerate launch":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    mine, theirs = both(tmp_path)
    trainer, plain = (make(small(), bf16=said_by == "argument") for make in (mine, theirs))
    before, wanted = (each.predict(texts(5, seed=1)).predictions for each in (trainer, plain))
    assert (before == wanted).all()
    trainer.train()
    plain.train()
    (first, *later), (wanted_first, *wanted_later) = (
        [entry for entry in each.state.log_history if "loss" in entry] for each in (trainer, plain)
    )
    assert first["loss"] == wanted_first["loss"]
    for entry, other in some(zip(later, wanted_later, strict=True)):
        assert entry["loss"] == pytest.approx(other["loss"], rel=2**-8)


def test_what_a_loss_draws_differs_by_step_and_microbatch(tmp_path: Path) -> None:
    drawn: list[float] = []

    def noisy(base: Any) -> Any:
        class Noisy(base):
            def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
                loss: Tensor = model(**inputs).loss
                drawn.append(float(torch.rand(())))
                return loss

        return Noisy

    mine, _ = both(tmp_path)
    trainer = mine(small(), of=noisy)
    trainer.train()
    assert len(drawn) == len(set(drawn)) == 12  # three steps of four microbatches
    first = list(drawn)
    drawn.clear()
    mine(small(), of=noisy).train()
    assert drawn == first


def test_another_trainer_in_between_changes_nothing(tmp_path: Path) -> None:
    mine, theirs = both(tmp_path)
    trainer, plain = mine(small()), theirs(small())
    plain.train()
    trainer.train()
    assert trainer.args.world_size == 1
    assert differences(outcome(trainer), outcome(plain)) == []


class Theirs(transformers.Trainer):
    """A trainer with a step of its own, in which fewer labels count."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Tensor:
        labels = inputs["labels"].masked_fill(inputs["labels"] % 2 == 0, -100)
        loss: Tensor = super().training_step(model, {**inputs, "labels": labels}, *args, **named)
        return loss


def test_the_step_of_a_trainer_behind_the_mixin_is_made_for_every_microbatch(tmp_path: Path) -> None:
    mixed = type("Mixed", (Trainer, Theirs), {})
    trainer = Making(mixed, tmp_path / "mine", tmp_path, IN_PROCESS)(small())
    plain = Making(Theirs, tmp_path / "theirs", tmp_path)(small())
    trainer.train()
    plain.train()
    assert differences(outcome(trainer), outcome(plain)) == []


def test_a_trainer_that_is_dropped_ends_at_once_and_so_does_its_pipeline(tmp_path: Path) -> None:
    mine, _ = both(tmp_path)
    trainer = mine(small(), dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer.train()
    trainer.evaluate()
    left = [weakref.ref(trainer), weakref.ref(trainer.pipeline)]
    gc.collect()
    gc.disable()  # which waits for processes that load data
    try:
        del trainer
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()


LINES: dict[str, dict[str, Any]] = {
    "lines": {"mesh": {"pp": 2, "dp": 2}},
    "lines that divide the state": {"mesh": {"pp": 2, "dp": 2}, "zero": 1},
}


def on_lines(settings: dict[str, Any], folder: Path) -> Outcome:
    """Train with half of the microbatches in each of two lines."""
    transformers.utils.logging.set_verbosity_error()
    make = Making(Trainer, folder, folder, settings)
    trainer = make(small(), **GIVEN, gradient_accumulation_steps=2, save_only_model="zero" in settings)
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    again = trainer
    if "zero" not in settings:
        again = make(small(), **GIVEN, gradient_accumulation_steps=2, output_dir=str(folder / "again"))
        again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    return outcome(
        trainer, after=after, again=outcome(again)["weights"], reads=reads(trainer), device=str(trainer.args.device)
    )


def reads(trainer: Any) -> list[int]:
    """Return the first token of every row of an epoch."""
    return [int(row[0]) for batch in trainer.get_train_dataloader() for row in batch["input_ids"]]


GIVEN: dict[str, Any] = {
    "train_sampling_strategy": "sequential", "train_dataset": texts(48), "save_strategy": "steps", "save_steps": 2,
    "max_steps": 4, "weight_decay": 0.1,
}  # fmt: skip


@pytest.mark.features("mesh")
@long
@pytest.mark.parametrize("name", LINES)
def test_two_lines_train_as_one_process_with_twice_the_accumulation(name: str, tmp_path: Path) -> None:
    plain = Making(transformers.Trainer, tmp_path / "theirs", tmp_path)(small(), **GIVEN, gradient_accumulation_steps=4)
    plain.train()
    wanted = outcome(plain, after=plain.evaluate()["eval_loss"])
    every_rank = dl.launch(on_lines, LINES[name], tmp_path / "mine", num_ranks=4)
    tokens = reads(plain)
    for each in every_rank:
        for entry, other in zip(each["log"], wanted["log"], strict=True):
            for number in ("loss", "grad_norm", "learning_rate", "step", "epoch", "train_loss"):
                assert (number in entry) == (number in other)
                assert entry.get(number, 0) == pytest.approx(other.get(number, 0), rel=1e-5)
        assert each["after"] == pytest.approx(wanted["after"], rel=1e-5)
        for what in ("weights", "again"):
            for tensor, value in wanted["weights"].items():
                torch.testing.assert_close(each[what][tensor], value, rtol=1e-5, atol=1e-6)
    assert every_rank[0]["reads"] != every_rank[-1]["reads"]
    assert sorted(every_rank[0]["reads"] + every_rank[-1]["reads"]) == sorted(tokens)
