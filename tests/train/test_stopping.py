"""SIGTERM and Ctrl-C: all ranks end after the same step with a checkpoint, from which the run goes on bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import drumline as dl
from drumline.core.errors import RunError, WaitTimeout
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    EvaluationSettings,
    LearningRateSettings,
    ModelSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.loop.run import run_training
from drumline.train.loop.training import TrainResult
from drumline.train.start import start
from matrices import long
from some import some

pytestmark = pytest.mark.torch

PATIENCE = 120.0  # no test takes so long, however busy the machine


def settings_for(folder: Path, *, steps: int = 100_000, **tables: Any) -> TrainSettings:
    given = TrainSettings(
        model=ModelSettings(num_layers=2, hidden=16, num_heads=2, dropout=0.1),
        batch=BatchSettings(sequences=8, microbatch=2, sequence=24),
        pipeline=PipelineSettings(device="cpu", timeout=PATIENCE),
        learning_rate=LearningRateSettings(shape="constant", warmup_steps=0),
        evaluation=EvaluationSettings(every=0),
        run=RunSettings(steps=steps, out=str(folder)),
    )
    return replace(given, **tables)


def quietly(settings: TrainSettings) -> TrainResult:
    return run_training(settings, tell=lambda told: None)


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()


def once(ready: Callable[[], bool], *acts: Callable[[], None]) -> Callable[[], None]:
    """Return what waits for something, and then acts, with a pause that makes each act one of its own."""

    def act() -> None:
        limit = time.monotonic() + PATIENCE
        while not ready() and time.monotonic() < limit:
            time.sleep(0.01)
        for number, function in enumerate(acts):
            time.sleep(0.8 if number else 0.0)
            function()

    return act


def signals(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@long
def test_sigterm_to_one_rank_ends_all_after_the_same_step_and_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "first"

    def on_a_rank(settings: TrainSettings) -> TrainResult:
        if os.environ["RANK"] == "1":
            watch = once((tmp_path / "step-2").exists, signals(signal.SIGTERM))
            threading.Thread(target=watch, daemon=True).start()
        return run_training(settings, tell=lambda told: (tmp_path / f"step-{told.step}").touch())

    found = start(settings_for(folder), train=on_a_rank)
    assert found.stopped is not None
    assert found.stopped.stopped == "SIGTERM on rank 1"
    done = found.stopped.step
    assert (found.stopped.checkpoint, len(found.losses)) == (f"{folder}/checkpoints/step-{done:08d}", done)
    record = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
    assert record == [{"step": done, "stopped": "SIGTERM on rank 1", "checkpoint": found.stopped.checkpoint}]
    assert num_lines(folder / "metrics.jsonl") == done
    in_turn = PipelineSettings(transport="in-process", device="cpu")
    again = CheckpointSettings(resume=str(folder), at_end=False)
    rest = quietly(settings_for(tmp_path / "rest", steps=done + 2, pipeline=in_turn, checkpoint=again))
    whole = quietly(settings_for(tmp_path / "whole", steps=done + 2, pipeline=in_turn))
    assert [*found.losses, *rest.losses] == whole.losses


@long
def test_ctrl_c_at_the_launcher_ends_an_evaluation_and_a_second_one_ends_everything_at_once(tmp_path: Path) -> None:
    # Batches without end: only a stop ends the evaluation.
    lasting = EvaluationSettings(every=2, batches=1, sample_every=2, sample_tokens=10**9)
    folder = tmp_path / "evaluated"
    given = settings_for(folder, evaluation=lasting, checkpoint=CheckpointSettings(every=1))
    with meanwhile(once(lambda: num_lines(folder / "evaluations.jsonl") >= 1, signals(signal.SIGINT))):
        found = start(given, train=quietly)
    assert found.stopped is not None
    assert (found.stopped.step, found.samples) == (2, [])
    assert found.stopped.stopped.startswith("Ctrl-C")
    assert Path(found.stopped.checkpoint).is_dir()

    folder = tmp_path / "hanging"

    def hangs(settings: TrainSettings) -> Any:
        def tell(told: Any) -> None:
            (tmp_path / f"rank-{os.getpid()}").touch()
            if getattr(told, "step", 0) == 3:
                time.sleep(PATIENCE)

        (tmp_path / f"rank-{os.getpid()}").touch()
        return run_training(settings, tell=tell)

    given = settings_for(folder, checkpoint=CheckpointSettings(every=1))
    saved = folder / "checkpoints" / "step-00000002"
    twice = once(saved.exists, signals(signal.SIGINT), signals(signal.SIGINT))
    with meanwhile(twice), pytest.raises(KeyboardInterrupt):
        start(given, train=hangs)
    ranks = [int(path.name.removeprefix("rank-")) for path in tmp_path.glob("rank-*")]
    assert len(ranks) == 2
    for process in some(ranks):
        assert not Path(f"/proc/{process}").exists(), "a rank is left behind"
    on = settings_for(
        tmp_path / "on", steps=3, checkpoint=CheckpointSettings(resume=str(folder), at_end=False),
        pipeline=PipelineSettings(transport="in-process", device="cpu"),
    )  # fmt: skip
    assert quietly(on).first_step == 2, "the last whole checkpoint remains"


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "stream")
def test_one_process_stops_before_its_first_step_if_it_was_asked_while_it_started(tmp_path: Path) -> None:
    in_turn = PipelineSettings(transport="in-process", device="cpu")
    with dl.stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        found = quietly(settings_for(tmp_path / "run", pipeline=in_turn))
    assert found.stopped is not None
    assert (found.stopped.step, found.stopped.checkpoint) == (0, "")
    assert (found.losses, signal.getsignal(signal.SIGTERM)) == ([], signal.SIG_DFL)


# ---- hangs -----------------------------------------------------------------------------------------------------------


def waits_for(file: Path) -> None:
    limit = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < limit:
        time.sleep(0.02)


def hold_up(how: str, folder: Path) -> str:
    """Hold up rank 1 before its second step; return the error of rank 0, which lets it go on."""
    import torch
    from torch import nn

    from drumline.channel import stacks

    stacks._target = None  # as torchrun starts ranks: nobody else asks for stacks
    rank, free = int(os.environ["RANK"]), folder / f"{how}-free"
    (folder / f"{how}-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    pipe = dl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], loss_fn=nn.functional.mse_loss, num_microbatches=2)
    x = torch.ones(2, 2)
    pipe.step(x, target=x)
    pipe.settle()
    pipe._crew.timeout = 1.0 if rank == 0 else PATIENCE
    if rank == 1 and how == "hangs":
        waits_for(free)
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        pipe.step(x, target=x)
        pipe.settle()
    except RunError as error:
        if isinstance(error, WaitTimeout):
            free.touch()
            os.kill(int((folder / f"{how}-1").read_text()), signal.SIGCONT)
        return str(error)
    return ""


@long
def test_a_rank_that_gives_up_shows_the_stacks_of_all_and_names_one_that_is_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = dl.launch(lambda: [hold_up("hangs", tmp_path), hold_up("stops", tmp_path)], num_ranks=2)
    assert "rank 0 at 0B0 waits for 1B0 or 1I0 of rank 1" in first[0]
    assert "(rank 1 does not answer: it is computing or hangs)" in first[0]
    process = (tmp_path / "stops-1").read_text()
    assert f"(rank 1 does not answer: its process {process} is stopped, by SIGSTOP or Ctrl-Z)" in first[1]
    for name in some(second):
        assert "rank 0 failed" in name, "rank 1 learns of it when it goes on"
    shown = capfd.readouterr().err
    of_rank_1 = shown.partition(f"drumline: stacks of rank 1, process {(tmp_path / 'hangs-1').read_text()}:")[2]
    assert " in waits_for" in of_rank_1.partition("drumline: ")[0]
    assert f"drumline: no stacks of rank 1: its process {process} is stopped" in shown
