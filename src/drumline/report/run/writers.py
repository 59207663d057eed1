"""Metrics for TensorBoard and Weights & Biases. Both packages are extras, and are imported when a writer is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from drumline.core.errors import UsageError


def needed(module: str, *, extra: str) -> Any:
    """Return a module that only an extra brings, or say how to get it.

    >>> needed("no_such_module", extra="viz")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: the package no_such_module is not installed; pip install 'drumline[viz]'
    """
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise UsageError(f"the package {name} is not installed", fix=f"pip install 'drumline[{extra}]'") from None


class TensorBoard:
    """Writes event files into a folder, with the package tensorboard alone; PyTorch is not needed."""

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        events = needed("tensorboard.summary.writer.event_file_writer", extra="tensorboard")
        self._event = needed("tensorboard.compat.proto.event_pb2", extra="tensorboard").Event
        self._summary = needed("tensorboard.compat.proto.summary_pb2", extra="tensorboard").Summary
        self._file = events.EventFileWriter(str(folder))
        self._clock = clock

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = self._event(wall_time=self._clock(), step=step, summary=self._summary(value=values))
        self._file.add_event(event)

    def close(self) -> None:
        """Write out what is left."""
        self._file.close()


class WandB:
    """Logs to a project of Weights & Biases, or to files where WANDB_MODE=offline says so."""

    def __init__(self, project: str, *, name: str | None = None, config: Mapping[str, Any] | None = None) -> None:
        self._run = needed("wandb", extra="wandb").init(project=project, name=name, config=dict(config or {}))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write out what is left."""
        self._run.finish()
