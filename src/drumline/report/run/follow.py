"""Follow a run's metrics as they arrive: in the terminal, TensorBoard, Weights & Biases, or your own code.

    for line in lines(run): ...            every step's metrics once, in order, until the run ends
    follow(run, writer)                    the same, into a writer: TensorBoard(folder), WandB(project)

The run only writes files and does not depend on this. It records when it ends; a killed run does not, and counts as
ended once nothing has arrived for `quiet` seconds, and for ten times its longest step. The packages that writers need
are optional extras, imported when a writer is created.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from drumline.core.errors import UsageError, installing
from drumline.core.measured.run import Run

QUIET = 60.0
SECONDS = "time_metrics/end_to_end(s)"
PARTS = ("busy", "wait", "transfer", "overhead", "unexplained")  # the parts of a rank's step


class Writer(Protocol):
    """Receives metrics step by step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a step."""

    def close(self) -> None:
        """Write out the rest."""


def follow(
    run: Run,
    *writers: Writer,
    quiet: float = QUIET,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Pass every step's metrics to the writers until the run ends; return how many steps there were.

    With `quiet=0`, only the steps written so far.
    """
    count = 0
    try:
        for line in lines(run, quiet=quiet, sleep=sleep, now=now):
            if line is None:
                continue
            count += 1
            for writer in writers:
                writer.write(line["step"], scalars(line))
    finally:
        for writer in writers:
            writer.close()
    return count


def lines(
    run: Run,
    *,
    quiet: float = QUIET,
    every: float = 0.5,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any] | None]:
    """Yield the metrics of every step once, and None whenever there is nothing new."""
    known, last, longest = 0, now(), 0.0
    while True:
        ended = run.has_ended  # checked before reading, so that everything written until then is found
        metrics = run.metrics(since=known)
        for line in metrics:
            longest = max(longest, line.get(SECONDS) or 0.0)
            yield line
        known += len(metrics)
        if not quiet:
            return
        if metrics:
            last = now()
        elif ended or now() - last >= max(quiet, 10 * longest):
            return
        yield None
        sleep(every)


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a step's line, without the step number.

    >>> scalars({"run": "abc", "step": 3, "loss": 0.5, "grad_norm": None})
    {'loss': 0.5}
    """
    return {
        name: float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def needed(module: str, *, extra: str) -> Any:
    """Import a module that comes with an extra, or raise an error that says how to install it.

    >>> needed("no_such_module", extra="viz")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: the package no_such_module is not installed; in your clone of ...
    """
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise UsageError(f"the package {name} is not installed", fix=installing(extra)) from None


class TensorBoard:
    """Writes event files into a folder; needs only the package tensorboard, not PyTorch.

    A full disk loses some points, and ends nothing: once there is room, another file of events continues.
    """

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._events = needed("tensorboard.summary.writer.event_file_writer", extra="tensorboard")
        self._event = needed("tensorboard.compat.proto.event_pb2", extra="tensorboard").Event
        self._summary = needed("tensorboard.compat.proto.summary_pb2", extra="tensorboard").Summary
        self._folder = str(folder)
        self._file: Any = None  # opened by the first point
        self._clock = clock

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = self._event(wall_time=self._clock(), step=step, summary=self._summary(value=values))
        try:
            if self._file is None:
                self._file = self._events.EventFileWriter(self._folder)
            self._file.add_event(event)
        except OSError:  # of this point or of earlier ones: they are written by a thread
            self.close()

    def close(self) -> None:
        """Write out the rest."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()


class WandB:
    """Logs to a Weights & Biases project, or to files with WANDB_MODE=offline."""

    def __init__(self, project: str, *, name: str | None = None, config: Mapping[str, Any] | None = None) -> None:
        self._run = needed("wandb", extra="wandb").init(project=project, name=name, config=dict(config or {}))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write out the rest."""
        self._run.finish()
