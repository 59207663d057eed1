"""A training run equals a plain loop of torch: losses, norms, rates, groups, accumulation by tokens."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.core.errors import BatchError, ConfigError, DrumlineError, RankFailed, UsageError
from drumline.core.simulate.steps import in_groups
from drumline.schedules import generate
from drumline.train.config.settings import (
    AdaptSettings,
    BatchSettings,
    CheckpointSettings,
    EvaluationSettings,
    LearningRateSettings,
    MeshSettings,
    ModelSettings,
    OptimizerGroup,
    OptimizerSettings,
    PipelineSettings,
    PrecisionSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.config.write import KEPT
from drumline.train.loop.curve import Curve
from drumline.train.loop.run import run_training
from drumline.train.loop.training import TrainResult
from refused import refused, saying
from some import some
from train.training import Ending, OwnLoss, Uneven, Writer, chain, cosine, made, plain_run, uneven

pytestmark = [
    pytest.mark.torch,
    pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream"),
]

MUON = OptimizerGroup(names=("layers.*",), kind="Muon", only_matrices=True, lr=0.02, settings={"weight_decay": 0.01})


def settings(folder: Path, **tables: Any) -> TrainSettings:
    base = TrainSettings(
        batch=BatchSettings(sequences=16, microbatch=2, sequence=6, accumulate=2),
        mesh=MeshSettings(pipeline=2),
        pipeline=PipelineSettings(transport="in-process", timeout=60),
        optimizer=OptimizerSettings(kind="AdamW", lr=3e-3, clip_norm=0.5),
        learning_rate=LearningRateSettings(shape="cosine", warmup_steps=2, final=0.1),
        evaluation=EvaluationSettings(every=0),
        run=RunSettings(steps=6, seed=3, out=str(folder)),
    )
    return replace(base, **tables)


def trained(given: TrainSettings, make: Callable[[], nn.Module] = Writer, tell: Any = lambda told: None) -> TrainResult:
    return run_training(given, tell=tell, make_model=made(make), make_data=uneven)


def seeded(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=3e-3)]


def muon_and_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = [param for name, param in named.items() if "layers." in name and param.dim() == 2]
    rest = [param for param in named.values() if not any(param is other for other in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01), torch.optim.AdamW(rest, lr=3e-3)]


@pytest.mark.parametrize(
    ("make", "schedule", "optimizers"),
    [
        (Writer, "1f1b", adam),
        (chain, "zb-h1", adam),
        (lambda: Writer(tied=True), "interleaved-1f1b", muon_and_adam),
        (Writer, "dualpipe-v", muon_and_adam),
        (OwnLoss, "gpipe", adam),
    ],
    ids=["module", "chain", "tied-muon", "two-stages-muon", "own-loss"],
)
def test_the_curve_equals_a_plain_loop_over_all_tokens(
    tmp_path: Path, make: Callable[[], nn.Module], schedule: str, optimizers: Callable[..., Any]
) -> None:
    groups = (MUON,) if optimizers is muon_and_adam else ()
    given = settings(
        tmp_path / "run",
        pipeline=PipelineSettings(transport="in-process", schedule=schedule),
        optimizer=OptimizerSettings(kind="AdamW", lr=3e-3, clip_norm=0.5, groups=groups),
        evaluation=EvaluationSettings(every=3),
    )
    found = trained(given, make)
    losses, norms, held_out = plain_run(seeded(make), given, optimizers, lambda step: cosine(step, 6, 2, 0.1))
    near = 1e-4 if groups else 1e-6  # Muon orthogonalises in bfloat16, which makes more of the order of sums
    assert found.losses == pytest.approx(losses, rel=near)
    assert found.grad_norms == pytest.approx(norms, rel=10 * near)
    assert [evaluation.step for evaluation in found.evaluations] == [3, 6]
    assert found.evaluations[-1].loss == pytest.approx(held_out, rel=near)
    assert found.losses[-1] < found.losses[0]


@pytest.mark.features("adapt", "moving")
def test_a_run_that_adapts_keeps_to_the_same_curve_whatever_it_decides(tmp_path: Path) -> None:
    plain = trained(settings(tmp_path / "plain")).losses
    eager = AdaptSettings(on=True, program=False, threshold=0.01, patience=1, cooldown=1, least_gain=0.0)
    adapted = trained(settings(tmp_path / "adapted", adapt=eager)).losses
    assert adapted == plain
    assert dl.read_run(tmp_path / "adapted").config["settings"]["adapt"]["threshold"] == 0.01


@pytest.mark.features("adapt")
def test_an_update_of_several_steps_runs_in_groups_where_their_number_may_change(tmp_path: Path) -> None:
    """GPipe's steps of 4 microbatches become groups; whether they then run all at once depends on measured times."""
    base = {"pipeline": PipelineSettings(schedule="gpipe", transport="in-process", timeout=60)}
    size = AdaptSettings(on=True, program=False, rebalance="keep", microbatches="size", least_gain=0.0, within=10**6)
    run = RunSettings(steps=12, seed=3, out=str(tmp_path / "groups"))
    found = trained(settings(tmp_path, run=run, adapt=replace(size, max_activations=8), **base))
    told = dl.read_run(tmp_path / "groups")
    programs = [told.timeline(step).program for step in told.steps]
    groups = in_groups(generate("gpipe", num_ranks=2, num_microbatches=4), 2)
    assert programs[0].compute_only().rows == groups.rows
    assert {program.num_microbatches for program in some(programs)} == {8}
    at_once = settings(tmp_path, run=run, batch=BatchSettings(sequences=16, microbatch=2, sequence=6))
    plain = plain_run(seeded(Writer), at_once, adam, lambda step: cosine(step, 12, 2, 0.1))
    assert found.losses == pytest.approx(plain[0], rel=1e-6)
    assert "accumulate = 2" in (tmp_path / "groups" / KEPT).read_text(), "the folder has what the user gave"


def test_low_precision_keeps_to_the_same_curve(tmp_path: Path) -> None:
    exact = trained(settings(tmp_path / "fp32"), chain).losses
    cases = {
        "bf16": PrecisionSettings(compute="bf16"),
        "fp16": PrecisionSettings(compute="fp16"),
        "masters": PrecisionSettings(weights="bf16", master_weights=True),
    }
    for name, precision in some(cases.items()):
        losses = trained(settings(tmp_path / name, precision=precision), chain).losses
        assert losses == pytest.approx(exact, rel=0.02), name
        assert losses != exact, name


def test_evaluating_and_sampling_change_no_bit_of_training(tmp_path: Path) -> None:
    """With dropout, whose masks are drawn by the number of the training step."""

    def run(name: str, asked: EvaluationSettings) -> TrainResult:
        given = settings(tmp_path, run=RunSettings(steps=3, seed=3, out=str(tmp_path / name)), evaluation=asked)
        return trained(given, lambda: chain(0.3))

    plain = run("plain", EvaluationSettings(every=0))
    asked = EvaluationSettings(every=1, sample_every=1, sample_tokens=4, prompt="abc", temperature=2.0)
    busy = run("busy", asked)
    assert busy.losses == plain.losses
    assert len(busy.evaluations) == len(busy.samples) == 3
    assert run("again", asked).samples == busy.samples
    assert len({sample.text for sample in busy.samples}) > 1


def test_a_greedy_sample_is_what_the_model_itself_writes(tmp_path: Path) -> None:
    asked = EvaluationSettings(every=0, sample_every=6, sample_tokens=8, prompt="ab", temperature=0)
    seen: list[nn.Module] = []

    def make() -> nn.Module:
        seen.append(Writer())
        return seen[-1]

    found = trained(settings(tmp_path / "run", evaluation=asked), make)
    tokens, letters = [1, 2], "|abcdefghijkl"
    while len(tokens) < 10:
        with torch.no_grad():
            chosen = int(seen[-1].eval()(torch.tensor([tokens[-6:]]))[0, -1].argmax())
        if chosen == 0:
            break
        tokens.append(chosen)
    assert found.samples[-1].text == "".join(letters[token] for token in tokens[2:])


def test_the_folder_holds_what_watch_and_report_read(tmp_path: Path) -> None:
    told: list[Any] = []
    asked = EvaluationSettings(every=3, sample_every=6, sample_tokens=2)
    found = trained(settings(tmp_path / "run", evaluation=asked), tell=told.append)
    run = dl.read_run(found.folder)
    lines = [metric for metric in run.metrics() if metric.get("train/step")]
    assert [line["train/step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["train/loss"] for line in lines] == found.losses
    assert lines[0]["grad_norm"] == pytest.approx(found.grad_norms[0])
    assert lines[1]["lr"] == pytest.approx(3e-3)
    assert 0 < lines[0]["padding"] < 1
    assert lines[-1]["n_tokens_seen"] == found.num_tokens
    held_out = [line.get("validation_metrics/global_avg_loss") for line in lines]
    assert [held_out[2], held_out[5]] == [evaluation.loss for evaluation in found.evaluations]
    assert held_out[0] is None
    assert run.has_ended
    read = [json.loads(line) for line in (found.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [value["loss"] for value in read] == [evaluation.loss for evaluation in found.evaluations]
    assert 0 <= read[0]["bubble"] < 1
    assert json.loads((found.folder / "samples.jsonl").read_text())["text"] == found.samples[0].text
    assert json.loads((found.folder / "settings.json").read_text())["optimizer"]["kind"] == "AdamW"
    assert [type(report).__name__ for report in told] == [
        *["Update"] * 3,
        "Evaluation",
        *["Update"] * 3,
        "Evaluation",
        "Sample",
    ]
    assert len(found.peak_bytes) == 2  # ranks, which take turns in this process


def test_losses_are_read_only_when_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device every reading would wait; the folder has all losses nevertheless."""
    reads: list[int] = []

    def read(curve: Curve) -> None:
        reads.append(len(curve._shares))
        original(curve)

    original = Curve.read
    monkeypatch.setattr(Curve, "read", read)
    monkeypatch.setattr("drumline.train.loop.progress._SECONDS_APART", 1e9)
    found = run_training(settings(tmp_path / "run"), make_model=made(Writer), make_data=uneven)
    assert reads == [1, 5, 0]  # the first is shown and the last; nothing is left at the end
    lines = [metric["train/loss"] for metric in dl.read_run(found.folder).metrics() if metric.get("train/step")]
    assert lines == found.losses == trained(settings(tmp_path / "told")).losses
    assert len(lines) == 6


def test_a_large_model_is_built_by_its_ranks_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device first; here every model is large."""
    small = ModelSettings(num_layers=2, hidden=16, num_heads=2, tied=True)
    losses = []
    for large in (2**31, 0):
        monkeypatch.setattr("drumline.train.loop.making._LARGE", large)
        run = RunSettings(steps=2, out=str(tmp_path / str(large)))
        given = settings(tmp_path, model=small, run=run, checkpoint=CheckpointSettings(at_end=False))
        losses.append(run_training(given, tell=lambda told: None).losses)
    assert losses[0] == losses[1]


REFUSED: list[tuple[dict[str, Any], type[DrumlineError], dict[str, str]]] = [
    ({"mesh": MeshSettings(expert=2)}, ConfigError, saying("mesh.expert is 2")),
    (
        {"optimizer": OptimizerSettings(kind="Adamw")},
        UsageError,
        saying("optimizer.kind is 'Adamw'", fix="did you mean AdamW"),
    ),
    (
        {"optimizer": OptimizerSettings(kind="LBFGS")},
        UsageError,
        saying("optimizer.kind is 'LBFGS', which a pipeline cannot run"),
    ),
    ({"optimizer": OptimizerSettings(settings={"beta": 1})}, UsageError, saying("beta is no argument of AdamW")),
    ({"optimizer": OptimizerSettings(kind="Muon")}, UsageError, saying("Muon got 'layers.0.norm.weight'")),
    (
        {"optimizer": OptimizerSettings(groups=(OptimizerGroup(names=("layer.0.inner.weight",)),))},
        UsageError,
        saying(r"groups\[0\]: no trainable parameter is named", fix="did you mean layers.0.inner.weight"),
    ),
    (
        {"optimizer": OptimizerSettings(groups=(OptimizerGroup(), OptimizerGroup(names=("head.*",))))},
        UsageError,
        saying(r"groups\[1\] gets no parameter"),
    ),
    (
        {"learning_rate": LearningRateSettings(shape="cosin")},
        ConfigError,
        saying("learning_rate.shape is 'cosin'", fix="did you mean cosine"),
    ),
    ({"pipeline": PipelineSettings(transport="in-process", layers=(3, 3))}, UsageError, saying("layers sum to 6")),
    (
        {"pipeline": PipelineSettings(transport="in-process", schedule="auto")},
        ConfigError,
        saying('schedule is "auto"'),
    ),
]


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    for number, (tables, kind, text) in enumerate(some(REFUSED)):
        with refused(kind, **text):
            trained(settings(tmp_path / str(number), **tables))


def test_layers_say_where_the_model_is_cut(tmp_path: Path) -> None:
    given = settings(tmp_path / "run", pipeline=PipelineSettings(transport="in-process", layers=(1, 3)))
    trained(given)
    blocks = dl.read_run(tmp_path / "run").plan["blocks"]
    assert [block for block in blocks[1] if block.startswith("layers.1")]
    assert not [block for block in blocks[0] if block.startswith("layers.1")]


def test_an_update_without_tokens_is_refused(tmp_path: Path) -> None:
    def empty(given: TrainSettings, built: Any, **_: Any) -> Any:
        data = uneven(given, built)
        return replace(data, training=Ending([replace(Uneven(8).batch(0), num_tokens=0)] * 2))

    with refused(BatchError, "no token of step 1 counts"):
        run_training(settings(tmp_path / "run"), tell=print, make_model=made(Writer), make_data=empty)


def test_processes_train_alike_and_one_that_fails_ends_all(tmp_path: Path) -> None:
    asked = EvaluationSettings(every=3, sample_every=3, sample_tokens=3, prompt="ab")
    groups = (MUON, OptimizerGroup(names=("head.*",), kind="SGD"))  # rank 0 holds no head
    optimizer = OptimizerSettings(lr=3e-3, clip_norm=0.5, groups=groups)
    tables: dict[str, Any] = {"optimizer": optimizer, "evaluation": asked}

    def short(folder: Path, **others: Any) -> TrainSettings:
        return settings(folder, **{**tables, "run": RunSettings(steps=3, seed=3, out=str(folder)), **others})

    def on_rank(folder: str) -> list[Any]:
        pipeline = PipelineSettings(timeout=60)
        found = trained(short(Path(folder) / "there", pipeline=pipeline))
        wrong = OptimizerSettings(groups=(OptimizerGroup(names=("haed.*",)),))
        try:
            trained(short(Path(folder) / "wrong", pipeline=pipeline, optimizer=wrong))
        except UsageError as error:
            refused = str(error)
        return [found.losses, found.evaluations[-1].loss, found.samples, len(found.peak_bytes), refused]

    def fails_on_one(folder: str) -> None:
        def broken(given: TrainSettings, built: Any, **_: Any) -> Any:
            batches = [Uneven(8).batch(at) for at in range(4)]
            return replace(uneven(given, built), training=Ending(batches[: 2 if os.environ["RANK"] == "1" else 4]))

        given = short(Path(folder) / "broken", pipeline=PipelineSettings(timeout=60))
        run_training(given, tell=lambda told: None, make_model=made(Writer), make_data=broken)

    here = trained(short(tmp_path / "here"))
    row, other = dl.launch(on_rank, str(tmp_path), num_ranks=2, timeout=240)
    assert row == other
    assert row[0] == pytest.approx(here.losses, rel=1e-6)
    assert row[1] == pytest.approx(here.evaluations[-1].loss, rel=1e-6)
    assert row[2] == here.samples
    assert row[3] == 2
    assert "no trainable parameter is named 'haed.*'" in row[4]
    assert dl.read_run(tmp_path / "there").has_ended
    with pytest.raises(RankFailed, match="rank 1 failed with BatchError: the data ended in step 2"):
        dl.launch(fails_on_one, str(tmp_path), num_ranks=2, timeout=120)


class Board:
    """Stands in for W&B."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.has_ended = False

    def init(self, **given: Any) -> Board:
        self.given = given
        return self

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.lines.append((step, metrics))

    def finish(self) -> None:
        self.has_ended = True


def test_figures_go_on_to_other_boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    monkeypatch.setitem(sys.modules, "wandb", board)
    run = RunSettings(steps=3, seed=3, out=str(tmp_path / "run"), wandb="project")
    found = trained(settings(tmp_path, run=run, evaluation=EvaluationSettings(every=2)))
    assert board.given["project"] == "project"
    assert [step for step, _ in board.lines] == [1, 2, 3]
    assert [line["train/loss"] for _, line in board.lines] == found.losses
    assert board.lines[1][1]["validation_metrics/global_avg_loss"] == found.evaluations[0].loss
    assert board.has_ended
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused(UsageError, "wandb is not installed"):
        trained(settings(tmp_path, run=replace(run, out=str(tmp_path / "none"))))
    assert not (tmp_path / "none").exists()
