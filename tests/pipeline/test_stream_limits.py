"""Schedules without a flush: what they hold, what they refuse, and how they go on after a failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.channel.launch.launch import launch
from drumline.channel.launch.stop import ask
from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.errors import ModelError, ProgramError, RankFailed, RunError, ScheduleError, UsageError
from drumline.core.measured.costs import replay
from drumline.core.measured.record import decoded
from drumline.core.memory import holdings
from drumline.features.stream.executor import StreamExecutor
from drumline.features.stream.rows import StreamRows
from drumline.pipeline.pipeline import Pipeline
from drumline.report.summary import summarize
from drumline.schedules import generate
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    EvaluationSettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.loop.run import run_training
from pipeline.test_stream import SCHEDULES, Case, pipeline
from refused import refused, saying
from runtime.test_clock import Device, DeviceClock, Event
from runtime.test_corridor import frames_of_ours
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("stream")]
WIDTH = 16


def program(kind: str, num_ranks: int, per_step: int, steps: int) -> Any:
    options: dict[str, Any] = {"vertical_sync": True} if kind == "vertical" else {}
    if kind == "2bw":
        return generate(SCHEDULES[kind], num_ranks=num_ranks, num_microbatches=per_step, num_steps=steps)
    return generate(SCHEDULES[kind], num_ranks=num_ranks, num_microbatches=per_step * steps, **options)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_slices_and_what_a_drain_runs_are_the_whole_program(kind: str) -> None:
    ranks, per_step, steps = 4, 5, 6
    rows = StreamRows.of(lambda count: program(kind, ranks, per_step, count), per_step)
    whole = program(kind, ranks, per_step, steps)
    for rank, row in some(enumerate(whole.rows)):
        sliced = [
            (cell.op, (position - cell.back) * per_step + cell.microbatch)
            for position in range(steps - 1)
            for cell in rows.slice(position)[rank]
        ]
        assert sliced == [(value.op, value.microbatch) for value in row[: len(sliced)]]
        rest = row[len(sliced) :]
        for op in some({value.op for value in rest}):  # a drain runs each kind in this order
            order = [value.microbatch for value in rest if value.op is op]
            assert order == sorted(order)


@pytest.mark.features("record")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_peak_versions_and_bytes_are_those_simulated(kind: str) -> None:
    ranks, per_step, steps = 4, 4, 4
    # A layer without a bias keeps its input, which is not counted, and its weight: so the stash is old versions alone.
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(ranks)))
    pipe = Pipeline(
        model, loss_fn=nn.functional.mse_loss, schedule=SCHEDULES[kind], vertical_sync=kind == "vertical",
        num_microbatches=per_step, num_ranks=ranks, transport="in-process", weigh=True, balance=[1] * ranks,
    )  # fmt: skip
    optimizer = pipe.optimizer(torch.optim.SGD, lr=1e-3)
    size = sum(param.nbytes for param in model[0].parameters())
    most = [0] * ranks
    for _ in some(range(steps)):
        pipe.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH))
        found = pipe.timeline().peak_stash
        assert found is not None
        most = [max(number, other) for number, other in zip(most, found, strict=True)]
    simulated = holdings(program(kind, ranks, per_step, steps), Costs(weight_bytes=size))
    versions = [v.peak for rank in pipe._engine.executors for v in rank.versions.values()]  # type: ignore[attr-defined]
    assert versions == [holding.peak_versions for holding in simulated]
    assert versions == ([2, 2, 2, 1] if kind == "2bw" else [4, 3, 2, 1])
    # The first layer's backward needs no weight, because the batch has no gradient: no version of it is kept. The last
    # rank also keeps what its loss needs.
    assert most[0] == 0
    assert [size + number for number in most[1:-1]] == [holding.peak_bytes for holding in simulated[1:-1]]
    pipe.drain()
    assert all(some(not rank.in_flight and not rank.pending for rank in pipe._engine.executors))  # type: ignore[attr-defined]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-3


def test_what_an_update_leaves_alone_is_shared_by_all_versions() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.frozen(self.used(x))
            return made

    first = Partly()
    pipe = Pipeline([first, nn.Linear(4, 4)], loss_fn=nn.functional.mse_loss, schedule="pipedream", num_microbatches=4,
                    num_ranks=2, transport="in-process", unused="ignore")  # fmt: skip
    pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    alone = (first.unused.weight, first.frozen.weight, first.frozen.bias)
    before = [tensor.data_ptr() for tensor in alone]
    for _ in range(2):
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
    assert [tensor.data_ptr() for tensor in alone] == before


def _small(**settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "schedule": "pipedream-2bw", "num_microbatches": 2,
                             "num_ranks": 2, "transport": "in-process"}  # fmt: skip
    return Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], **{**given, **settings})


@pytest.mark.features("capture", "precision")
@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"capture": True}, UsageError, saying("capture is True, and pipedream-2bw has no flush")),
        ({"programs": {"long": 2}}, UsageError, saying("has no flush")),
        ({"precision": "fp16"}, UsageError, saying("precision is 'fp16'")),
        (
            {"schedule": generate("pipedream", num_ranks=2, num_microbatches=2)},
            ProgramError,
            saying("given as a program, and pipedream has no flush", fix="schedule='pipedream'"),
        ),
        ({"schedule": "1f1b", "vertical_sync": True}, ScheduleError, saying("no option 'vertical_sync'")),
        ({"num_microbatches": 1}, ScheduleError, saying("needs a third weight version")),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(settings: Any, error: Any, words: dict[str, str]) -> None:
    with refused(error, **words):
        _small(**settings)


def test_calls_that_make_no_sense_are_refused() -> None:
    x = torch.ones(4, 4)
    pipe = _small()
    with refused(RunError, "steps optimizers inside pipe.step", fix=r"pipe\.optimizer"):
        pipe.step(x, target=x)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    with refused(UsageError, r"share is 0\.5"):
        pipe.step(x, target=x, share=0.5)
    pipe.step(x, target=x)
    with refused(RunError, r"SGD\.step\(\) was called", fix=r"remove optimizer\.step"):
        optimizer.step()
    with refused(RunError, "clip_grad_norm_ was called", fix="max_norm="):
        pipe.clip_grad_norm_(1.0)
    with refused(RunError, fix=r"pipe\.drain\(\) on every rank"):
        pipe.state_dict()
    optimizer.zero_grad()  # has nothing to forget, and forgets nothing that is due
    pipe.drain()
    assert pipe.state_dict().keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    shared = nn.Linear(4, 4)
    with refused(UsageError, r"0\.weight and 2\.weight are one tensor", expected="a process for every rank"):
        Pipeline([shared, nn.ReLU(), shared], loss_fn=nn.functional.mse_loss, schedule="pipedream-2bw",
                 num_microbatches=2, num_ranks=2, transport="in-process", balance=[1, 2])  # fmt: skip


@pytest.mark.features("saving")
def test_a_checkpoint_with_updates_due_goes_on_only_as_it_was(tmp_path: Path) -> None:
    x = torch.ones(4, 4)
    pipe = _small()
    pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(x, target=x)
    pipe.save(tmp_path / "due", wait=True)
    pipe.drain()
    pipe.save(tmp_path / "drained", wait=True)
    flushed = _small(schedule="1f1b")
    kept = flushed.optimizer(torch.optim.SGD, lr=0.1)
    with refused(ModelError, fix=r"pipe\.drain\(\) before pipe\.save"):
        flushed.load(tmp_path / "due")
    flushed.load(tmp_path / "drained")
    for (name, param), other in zip(some(pipe.named_parameters()), flushed.parameters(), strict=True):
        assert torch.equal(param, other), name
    assert kept.param_groups


@pytest.mark.features("saving")
def test_a_drain_right_after_loading_makes_the_updates_on_a_device_with_a_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(4, 4)
    pipe = _small()
    pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(x, target=x)
    pipe.save(tmp_path, wait=True)
    pipe.drain()
    device = Device()
    monkeypatch.setattr("torch.cuda.current_stream", lambda: device)
    monkeypatch.setattr("torch.cuda.Event", lambda **_: Event(device))
    other = _small()
    other.optimizer(torch.optim.SGD, lr=0.1)
    other.load(tmp_path)
    for executor in other._engine.executors:
        executor.clock = DeviceClock(device)
    other.drain()
    for (name, param), expected in zip(some(other.named_parameters()), pipe.parameters(), strict=True):
        assert torch.equal(param, expected), name


@pytest.mark.features("precision", "saving")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_an_update_with_a_nan_that_is_due_in_a_checkpoint_is_left_out_by_the_run_that_goes_on(
    kind: str, tmp_path: Path
) -> None:
    case = Case(kind, "AdamW", 3, 3, num_steps=6, bad=(2,), max_norm=None if kind == "pipedream" else 0.1)
    expected, batches = case.emulated(), case.batches()
    pipe, _kept = pipeline(case, transport="in-process")
    results = [pipe.step(x, target=y) for x, y in batches[:3]]
    assert not results[2].skipped, "this is known later, or once nothing is in flight"
    pipe.save(tmp_path, wait=True)
    assert [result.skipped for result in results] == ["", "", "rank 0, 1, 2"]
    other, _optimizers = pipeline(case, transport="in-process")
    other.load(tmp_path)
    for each in some((pipe, other)):
        later = [each.step(x, target=y) for x, y in batches[3:]]
        each.drain()
        assert not any(some(result.skipped for result in later)), "a step is told once"
        for name, entry in some(each.state_dict().items()):
            assert torch.equal(entry, expected.weights[name]), name


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_ranks_that_train_nothing_take_part_in_leaving_out_an_update(frozen: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[frozen].requires_grad_(False)
    pipe = Pipeline(layers, loss_fn=nn.functional.mse_loss, schedule="pipedream-2bw", num_microbatches=3, num_ranks=3,
                    transport="in-process")  # fmt: skip
    pipe.optimizer(torch.optim.SGD, lr=0.1, max_norm=1.0)
    x = torch.ones(6, 4)
    results = [pipe.step(x * torch.nan if step == 1 else x, target=x) for step in range(6)]
    assert all(some(len(executor.pending) <= 2 for executor in pipe._engine.executors))  # type: ignore[attr-defined]
    pipe.drain()
    assert [bool(result.skipped) for result in results] == [False, True, False, False, False, False]
    assert all(some(bool(entry.isfinite().all()) for entry in pipe.state_dict().values()))


@pytest.mark.features("saving")
def test_a_step_that_fails_needs_a_checkpoint(tmp_path: Path) -> None:
    x = torch.ones(4, 4)
    pipe = _small()
    pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(x, target=x)
    pipe.save(tmp_path, wait=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pipe.step(torch.ones(4, 3), target=x)
    with refused(RunError, "a step failed", fix="load a checkpoint"):
        pipe.step(x, target=x)
    pipe.load(tmp_path)
    pipe.step(x, target=x)
    pipe.drain()


def _killed(case: Case, folder: str) -> None:
    """Train on this rank; in step 4 rank 1 is killed."""
    pipe, _kept = pipeline(case, transport="shared-memory", timeout=60.0)
    for step, (x, y) in enumerate(case.batches()):
        if step == 4 and pipe.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.step(x, target=y)
        if step == 2:
            pipe.save(folder, wait=True)


def _resumed(case: Case, folder: str) -> dict[str, Tensor]:
    pipe, _kept = pipeline(case, transport="shared-memory", timeout=60.0)
    with pipe:
        pipe.load(folder)
        for x, y in case.batches()[3:]:
            pipe.step(x, target=y)
        pipe.drain()
        return {name: entry.clone() for name, entry in pipe.state_dict().items()}


@pytest.mark.features("precision", "saving")
def test_a_killed_rank_ends_all_and_the_run_goes_on_exactly(tmp_path: Path) -> None:
    case = Case("2bw", "AdamW", 2, 2, num_steps=6)
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        launch(_killed, case, str(tmp_path), num_ranks=2)
    expected = case.emulated().weights
    for rank in some(launch(_resumed, case, str(tmp_path), num_ranks=2)):
        for name, tensor in some(rank.items()):
            assert torch.equal(tensor, expected[name]), name


def settings_of(folder: Path, schedule: str, steps: int = 10, **tables: Any) -> TrainSettings:
    given: dict[str, Any] = {
        "model": ModelSettings(kind="mlp", num_layers=4, hidden=8),
        "batch": BatchSettings(sequences=8, microbatch=2, sequence=8),
        "mesh": MeshSettings(pipeline=2),
        "pipeline": PipelineSettings(transport="in-process", schedule=schedule),
        "optimizer": OptimizerSettings(kind="AdamW", lr=3e-3, clip_norm=0.0),
        "evaluation": EvaluationSettings(every=0),
        "run": RunSettings(steps=steps, seed=3, out=str(folder)),
    }
    return TrainSettings(**{**given, **tables})


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving")
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_drumline_train_stops_where_it_is_asked_to_and_goes_on_exactly(schedule: str, tmp_path: Path) -> None:
    quiet = lambda told: None  # noqa: E731
    evaluated = settings_of(tmp_path / "one", schedule, evaluation=EvaluationSettings(every=2))
    whole = run_training(evaluated, tell=quiet)
    assert len(whole.losses) == 10

    def stop(told: Any) -> None:
        if getattr(told, "loss", None) is not None and told.step == 1:
            ask("SIGINT")

    kept = settings_of(tmp_path / "two", schedule, checkpoint=CheckpointSettings(every=0))
    first = run_training(kept, tell=stop)
    assert first.stopped is not None
    assert 1 < first.stopped.step < 10
    second = run_training(kept, tell=quiet, continues=True)
    assert first.losses + second.losses == whole.losses


@pytest.mark.features("record")
@pytest.mark.parametrize(
    ("schedule", "per_step", "frozen"),
    [
        ("pipedream-2bw", 4, None),
        ("pipedream", 1, None),
        ("pipedream", 3, None),
        ("pipedream", 4, 0),
        ("pipedream", 4, 3),
    ],
)
def test_every_place_says_the_same_of_what_a_step_holds(schedule: str, per_step: int, frozen: int | None) -> None:
    ranks = 4
    layers = [nn.Linear(4, 4).requires_grad_(at != frozen) for at in range(ranks)]
    pipe = Pipeline(layers, loss_fn=nn.functional.mse_loss, schedule=schedule,
                    num_microbatches=per_step, num_ranks=ranks, transport="in-process", balance=[1] * ranks,
                    weigh=False)  # fmt: skip
    pipe.optimizer(torch.optim.SGD, lr=0.1)
    for _ in some(range(7)):
        x = torch.ones(per_step, 4)
        pipe.step(x, target=x)
        measured = pipe.timeline()
        again = replay(measured)
        ours, theirs = summarize(measured), summarize(again)
        for name in some(("actions", "updates", "microbatches", "peak_activations", "weight_versions")):
            assert ours.get(name) == theirs.get(name), name
        assert ours["microbatches"] == per_step
        assert again.busy == pytest.approx(measured.busy)
        assert sum(cause.seconds for cause in again.causes) == pytest.approx(sum(again.idle))
        for row, holding, held in zip(measured.program.rows, measured.memory, measured.held, strict=True):
            after = [pairs for _, pairs in holding.pairs]
            assert after == list(held), row
    if frozen is None:
        assert measured.peak_activations == (4, 3, 2, 1), "as in FACTS.md"
        versions = [item.peak_versions for item in measured.memory]
        assert versions == ([4, 3, 2, 1] if schedule == "pipedream" else [2, 2, 2, 1])
    pipe.drain()


@pytest.mark.features("record")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_messages_are_noted_under_the_numbers_of_the_steps_program(kind: str) -> None:
    ranks = 3
    pipe = Pipeline(
        [nn.Linear(4, 4) for _ in range(ranks)], loss_fn=nn.functional.mse_loss, schedule=SCHEDULES[kind],
        vertical_sync=kind == "vertical", num_microbatches=3, num_ranks=ranks, transport="in-process",
        balance=[1] * ranks,
    )  # fmt: skip
    pipe.optimizer(torch.optim.SGD, lr=0.1)
    early = 0
    for _ in some(range(5)):
        pipe.step(torch.ones(3, 4), target=torch.ones(3, 4))
        timeline = pipe.timeline()
        for row, record in zip(timeline.program.rows, timeline.records, strict=True):
            takers = {at: decoded(*named) for at, *named in (group[:4] for group in record.rows("messages"))}
            assert {at: (taker.stage, taker.microbatch) for at, taker in takers.items()} == {
                at: (action.stage, action.microbatch) for at, action in enumerate(row) if _receives(action, ranks)
            }
            sent = [decoded(*group[:3]) for group in record.rows("sends")]
            assert sent == [made.recv for action in row if (made := rules.message(action, ranks)) is not None]
            newest = {action.microbatch for action in row if action.op is Op.FORWARD}
            early += sum(action.microbatch not in newest for action in sent)
    assert early > 0, "no message belonged to an earlier step"


def _receives(action: Action, num_stages: int) -> bool:
    needed = [each[0] for each in rules.needs(action, num_stages)]
    return any(other.stage != action.stage and rules.message(other, num_stages) is not None for other in needed)


def test_slices_and_pauses_run_in_the_loop_that_runs_all_rows() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            made = self.layer(x)
            if made.requires_grad:
                forwards.append(frames_of_ours())
                made.register_hook(lambda _: backwards.append(frames_of_ours()))
            return made

    forwards: list[list[str]] = []
    backwards: list[list[str]] = []
    pipe = Pipeline(
        [Counts(), Counts()], loss_fn=nn.functional.mse_loss, schedule="pipedream-2bw", num_microbatches=2,
        num_ranks=2, transport="in-process", balance=[1, 1],
    )  # fmt: skip
    pipe.optimizer(torch.optim.SGD, lr=0.1)
    x = torch.ones(4, 4)
    for _ in range(3):
        pipe.step(x, target=x)
    in_steps = len(backwards)
    pipe.eval_step(x, target=x)
    assert 0 < in_steps < len(backwards) == len(forwards), "the rest runs in a pause"
    for way in some(forwards):
        at = way.index("Executor.run")
        assert way[at:] == ["Executor.run", "StreamExecutor._forward", "Stage.forward", "Segment.run"]
    for way in some(backwards):
        at = way.index("Executor.run")
        assert way[at : at + 3] == ["Executor.run", "StreamExecutor._backward", "Stage.backward"]


def test_executors_of_flushed_programs_stay_as_they_are() -> None:
    pipe = _small(schedule="1f1b")
    assert not any(some(isinstance(executor, StreamExecutor) for executor in pipe._engine.executors))
    pipe.drain()  # does nothing
    assert pipe.steps_in_flight == 0
