"""Train the two-stage build with several schedules on two local ranks, and check each against one process.

Each trial is trained, recorded as a run, and read back from its folder, so everything shown can be read there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from drumline.channel.launch.launch import launch
from drumline.core.costs import Costs
from drumline.core.errors import RecordError
from drumline.core.measured.measured import Measured
from drumline.core.measured.run import CONFIG, ENVIRONMENT, METRICS, PLAN, PROGRAM, Run, rank_file, read_run
from drumline.core.simulate.simulate import simulate
from drumline.model.precision import one_thread
from drumline.schedules import schedules
from drumline.train.two_stages import NUM_RANKS, Build, DemoResult, DemoTrial, train, train_unsplit

STALE = next(name for name, schedule in schedules().items() if not schedule.flushed and "num_steps" in schedule.options)
TRIALS = (
    DemoTrial("gpipe", 4),
    DemoTrial("1f1b", 4),
    DemoTrial("zb-h1", 4),
    DemoTrial(STALE, 4),
    DemoTrial("gpipe", 8),
    DemoTrial("gpipe", 8, "full"),
    DemoTrial("1f1b", 8),
    DemoTrial("1f1b", 8, "full"),
)
COMPARED = {"gpipe": "GPipe", "1f1b": "1F1B"}  # the schedules at the top of the report, by their common names
Tell = Callable[[int, int, str], None]  # how many are done, of how many, and which it is

_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Outcome:
    """The result of one trial; figures are medians over the steps after the first epoch."""

    build: Build
    trial: DemoTrial
    run: Run
    losses: tuple[float, ...]
    difference: float  # largest difference of any weight or epoch's loss from one process

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of all steps after the first epoch, which warms up; of its second half if there is only one."""
        metrics = self.run.metrics()
        return metrics[len(metrics) // max(self.build.num_epochs, 2) :]

    def metric(self, name: str) -> float:
        """Return the median of a metric."""
        return float(median(metric[name] for metric in self.metrics))

    @property
    def utilisation(self) -> float:
        """The share of ranks x makespan in which something was computed.

        Without a flush, steps overlap: what counts is the time in which a rank ran its part of a step.
        """
        return 1 - self.metric("pp/span_bubble" if self.run.program.num_updates else "pp/bubble")

    @property
    def step_seconds(self) -> float:
        """The seconds of a step; without a flush, those from one step's end to the next one's."""
        return self.metric("time_metrics/end_to_end(s)" if self.run.program.num_updates else "pp/makespan_seconds")

    @cached_property
    def bound(self) -> float:
        """The most that the schedule allows, with equal stages and free messages: M / (M + P - 1) if it is flushed."""
        if self.run.program.num_updates:
            return 1.0
        return 1 - simulate(self.run.program, Costs()).bubble

    @cached_property
    def timeline(self) -> Measured:
        """A step of median length."""
        middle = sorted(self.metrics, key=lambda entry: float(entry["pp/makespan_seconds"]))[len(self.metrics) // 2]
        return self.run.timeline(middle["step"])

    @cached_property
    def simulated_utilisation(self) -> float:
        """The same in simulation, with the measured op times: anything below it is lost to messages and overhead."""
        if self.run.program.num_updates:  # the busiest rank never waits
            busy = [sum(track.ends) - sum(track.starts) for track in self.timeline.tracks]
            return sum(busy) / len(busy) / max(busy)
        return 1 - simulate(self.run.program, self.timeline.measured_costs()).bubble

    @cached_property
    def peak_stash(self) -> tuple[int, ...]:
        """The most bytes of activations that each rank held at once, measured in the first step of a run."""
        peak = self.run.timeline(self.run.steps[0]).peak_stash
        assert peak is not None, "memory is measured in the first step of a run"
        return peak

    def summary(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "schedule": self.trial.schedule,
            "microbatches": self.trial.num_microbatches,
            "checkpoint": self.trial.checkpoint,
            "losses": self.losses,
            "step_seconds": self.step_seconds,
            "utilisation": self.utilisation,
            "bound": self.bound,
            "simulated_utilisation": self.simulated_utilisation,
            "peak_queue": max(self.metric(name) for name in self.metrics[0] if name.endswith("/peak_queue")),
            "peak_stash_bytes": self.peak_stash,
            "difference": self.difference,
            "run": str(self.run.path),
        }


def run_demo(
    folder: Path,
    build: Build | None = None,
    *,
    progress: Tell = lambda done, of, what: None,
    finished: Tell = lambda done, of, what: None,
) -> list[Outcome]:
    """Train the build with every trial on two local ranks, each a run in `folder`, and compare with one process.

    `progress` hears of steps now and then, `finished` of every run once, when it has ended.
    """
    build = build or Build()
    folders = [folder / trial.name for trial in TRIALS]
    for place in folders:
        _clear(place)
    counts = sorted({(trial.num_microbatches, trial.schedule == STALE) for trial in TRIALS})
    unsplit, total = {}, build.num_steps * (len(counts) + len(TRIALS))
    with one_thread():
        for at, (count, is_stale) in enumerate(counts):
            what = f"one process, {count} microbatches" + (", updates one step late" if is_stale else "")
            progress(at * build.num_steps, total, what)
            unsplit[count, is_stale] = train_unsplit(build, count, is_stale=is_stale)
            finished(at + 1, len(counts) + len(TRIALS), what)
    done = build.num_steps * len(counts)
    watch = _Progress(
        folders,
        build.num_steps,
        lambda steps, what: progress(done + steps, total, what),
        lambda at, what: finished(len(counts) + at, len(counts) + len(TRIALS), what),
    )
    with watch.looking():
        ranks = launch(_train_all, build, [str(place) for place in folders], num_ranks=NUM_RANKS, backend="gloo")
    progress(total, total, "done")
    outcomes = []
    for at, (trial, path) in enumerate(zip(TRIALS, folders, strict=True)):
        parts = [rank[at] for rank in ranks]
        difference = _difference(parts, unsplit[trial.num_microbatches, trial.schedule == STALE])
        outcomes.append(Outcome(build, trial, read_run(path), parts[0].losses, difference))
    return outcomes


def _train_all(build: Build, folders: Sequence[str]) -> list[DemoResult]:
    """Train every trial on this rank."""
    return [train(build, trial, record=folder) for trial, folder in zip(TRIALS, folders, strict=True)]


def _difference(parts: Sequence[DemoResult], unsplit: DemoResult) -> float:
    """Return the largest difference of all ranks' weights and losses from one process; infinite if any is missing."""
    weights = {name: weight for part in parts for name, weight in part.weights.items()}
    if weights.keys() != unsplit.weights.keys():
        return float("inf")
    distances = [float((weight - unsplit.weights[name]).abs().max()) for name, weight in weights.items()]
    losses = [abs(a - b) for part in parts for a, b in zip(part.losses, unsplit.losses, strict=True)]
    return max(*distances, *losses)


def _clear(folder: Path) -> None:
    """Remove the run of an earlier demo, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, PLAN, PROGRAM, ENVIRONMENT, METRICS, *(rank_file(rank) for rank in range(NUM_RANKS))):
        (folder / name).unlink(missing_ok=True)


class _Progress:
    """Reports how far the runs are: how many steps all have together, and each run once, when it has all of its own."""

    def __init__(
        self,
        folders: Sequence[Path],
        num_steps: int,
        tell: Callable[[int, str], None],
        finished: Callable[[int, str], None],
    ) -> None:
        self.folders, self.num_steps, self.tell, self.finished = folders, num_steps, tell, finished
        self.num_finished = 0

    def look(self) -> None:
        """Report what is new since the last look."""
        steps, what = 0, self.folders[0].name
        for at, folder in enumerate(self.folders):
            try:
                num_steps = read_run(folder).num_steps
            except RecordError:  # has not begun yet
                break
            steps, what = steps + num_steps, folder.name
            if num_steps >= self.num_steps and at == self.num_finished:
                self.num_finished += 1
                self.finished(self.num_finished, what)
        self.tell(steps, what)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look now and then, from another thread, and once at the end."""
        over = threading.Event()

        def keep_looking() -> None:
            while not over.wait(_SECONDS_BETWEEN_LOOKS):
                self.look()

        thread = threading.Thread(target=keep_looking, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        self.look()
