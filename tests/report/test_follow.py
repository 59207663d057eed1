"""Following a run that grows, into writers and onto a screen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drumline.core.errors import UsageError
from drumline.core.measured.run import read_run
from drumline.report.run import follow as following
from drumline.report.run.follow import follow, lines
from drumline.report.run.live import ASCII, FINE, LiveRun
from drumline.schedules import generate
from refused import refused
from simulated_runs import per_stage, write_simulated_run

PROGRAM = generate("1f1b", num_ranks=2, num_microbatches=4)


class Remembered:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.last: Mapping[str, float] = {}
        self.is_closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.last = metrics

    def close(self) -> None:
        self.is_closed = True


class Clock:
    """Time that passes only where somebody sleeps; something may happen meanwhile."""

    def __init__(self, meanwhile: Callable[[float], None] = lambda time: None) -> None:
        self.time = 0.0
        self.meanwhile = meanwhile

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        assert self.time < 10_000, "nobody ends this"
        self.meanwhile(self.time)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_simulated_run(tmp_path / "run", PROGRAM, per_stage(1e-3, 2e-3))


def add(folder: Path, step: int, **more: Any) -> None:
    line = {"run": "abc", "step": step, "time_metrics/end_to_end(s)": 1.0, **more}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def test_a_writer_gets_every_step_once_until_the_run_says_that_it_has_ended(folder: Path) -> None:
    def goes_on(time: float) -> None:
        if time == 2:
            add(folder, 3, loss=0.25)
        if time == 5:
            add(folder, 4, loss=0.125)
            (folder / "ended.json").write_text('{"run": "abc"}')

    writer, clock = Remembered(), Clock(goes_on)
    assert follow(read_run(folder), writer, sleep=clock.sleep, now=clock.now) == 5
    assert writer.steps == [0, 1, 2, 3, 4]
    assert writer.last == {"time_metrics/end_to_end(s)": 1.0, "loss": 0.125}
    assert writer.is_closed
    assert clock.time < 10, "it ends with the run"


def test_a_killed_run_is_left_once_it_has_been_quiet_for_ten_of_its_steps(folder: Path) -> None:
    add(folder, 3, **{"time_metrics/end_to_end(s)": 100.0})
    clock = Clock()
    assert len([line for line in lines(read_run(folder), sleep=clock.sleep, now=clock.now) if line]) == 4
    assert 1000 <= clock.time <= 1010


def test_without_patience_what_is_there_is_all(folder: Path) -> None:
    clock = Clock()
    assert follow(read_run(folder), quiet=0, sleep=clock.sleep, now=clock.now) == 3
    assert clock.time <= 1


def test_a_writer_is_closed_when_following_is_interrupted(folder: Path) -> None:
    def interrupt(time: float) -> None:
        raise KeyboardInterrupt

    writer, clock = Remembered(), Clock(interrupt)
    with pytest.raises(KeyboardInterrupt):
        follow(read_run(folder), writer, sleep=clock.sleep, now=clock.now)
    assert writer.is_closed


METRICS = {
    "run": "abc",
    "step": 7,
    "loss_metrics/global_avg_loss": 0.5,
    "throughput(rows/s)": 800.0,
    "time_metrics/end_to_end(s)": 0.25,
    "pp/bubble": 0.3,
    "pp/makespan_seconds": 0.2,
    "pp/rank0/busy_seconds": 0.1,
    "pp/rank0/wait_seconds": 0.1,
    "pp/rank1/busy_seconds": 0.15,
    "pp/rank1/transfer_seconds": 0.05,
    "pp/edge0-1/peak_queue": 3,
}


def test_the_screen_shows_loss_throughput_bubble_and_queues() -> None:
    live = LiveRun("first", PROGRAM, marks=ASCII)
    assert live.frame().splitlines()[1] == "no step yet"
    live.add({**METRICS, "step": 6, "loss_metrics/global_avg_loss": 1.0})
    live.add(METRICS)
    frame = live.frame(60).splitlines()
    assert frame[0] == "first: 1f1b, 2 ranks, 2 stages, 4 microbatches"
    assert frame[1] == "step 7   loss 0.5   800 rows/s   250 ms per step   bubble 30"
    assert frame[2] == "loss      ^_"
    assert frame[3] == f"rank 0    {'#' * 10}{'=' * 10}  busy  50%  bubble  50%"
    assert frame[4] == f"rank 1    {'#' * 15}{'-' * 5}  busy  75%  bubble  25%"
    assert frame[5] == "0 -> 1    ###                   at most 3 waiting"
    assert live.row().endswith("bubble 30.0%   per rank 50% 25%   queues 0->1 3")
    assert live.to_json()["bubble_per_rank"] == pytest.approx([0.5, 0.25])
    assert live.to_json()["metrics"] == METRICS


def test_a_captured_step_has_no_bars_and_a_loss_may_not_be_finite() -> None:
    live = LiveRun("first", PROGRAM, marks=FINE)
    live.add({"run": "abc", "step": 1, "loss_metrics/global_avg_loss": None})
    assert live.frame().splitlines()[1:] == ["step 1   loss not finite"]
    assert live.row() == "step 1   loss not finite"


class FakeWandB:
    """The few calls of wandb that are used."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.settings: dict[str, Any] = {}
        self.is_finished = False

    def init(self, **settings: Any) -> FakeWandB:
        self.settings = settings
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.is_finished = True


def test_weights_and_biases_gets_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setattr(following, "import_module", lambda name: fake)
    follow(read_run(folder), following.WandB("project", name="run", config={"a": 1}), quiet=0)
    assert fake.settings == {"project": "project", "name": "run", "config": {"a": 1}}
    assert [step for step, _ in fake.logged] == [0, 1, 2]
    assert fake.logged[0][1]["loss_metrics/global_avg_loss"] == 1.0
    assert fake.is_finished


def test_tensorboard_reads_what_its_writer_wrote(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow(read_run(folder), following.TensorBoard(tmp_path / "events"), quiet=0)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    losses = [(Scalar.step, Scalar.value) for Scalar in events.Scalars("loss_metrics/global_avg_loss")]
    assert losses == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    assert "pp/bubble" in events.Tags()["scalars"]


@pytest.mark.parametrize(
    ("make", "extra"), [(lambda: following.TensorBoard("x"), "tensorboard"), (lambda: following.WandB("x"), "wandb")]
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    make: Callable[[], object], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(following, "import_module", refuse)
    with refused(UsageError, f"{extra} is not installed", fix=rf"pip install -e '\.\[{extra}\]'"):
        make()


def test_what_is_there_by_now_is_handed_over_without_sleeping(tmp_path: Path) -> None:
    run = read_run(write_simulated_run(tmp_path / "run", PROGRAM, per_stage(1.0, 2.0)))

    def never(seconds: float) -> None:
        raise AssertionError(f"it slept for {seconds} s")

    assert [line["step"] for line in lines(run, quiet=0.0, sleep=never) if line is not None] == [0, 1, 2]
