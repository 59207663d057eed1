"""What saves and loads a run: what it promises, and what it returns.

`drumline train` knows this alone. Which feature keeps the promise is named where features are attached.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from drumline.checkpoint.extra_files import Maker
from drumline.core.errors import RecordError, UsageError, WaitTimeout


@dataclass
class Saving:
    """A checkpoint on its way to disk; `path` is where it will appear.

    `seconds_blocked` is how long training stood still for it. Each process may take `timeout` seconds.

    >>> saving = Saving(Path("run/step-00000100"), 100)
    >>> saving.done
    False
    >>> saving.end()
    >>> saving.done, saving.wait().name
    (True, 'step-00000100')
    """

    path: Path
    step: int
    seconds_blocked: float = 0.0
    refusal: RecordError | None = None  # why it could not even begin, on any process
    timeout: float = 300.0
    _over: threading.Event = field(default_factory=threading.Event, repr=False)
    _error: BaseException | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        """Whether it is whole on disk, or has failed."""
        return self._over.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it did not, or is not over."""
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """Tell whoever waits that it is whole, or why it failed."""
        self._error = error
        self._over.set()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, no longer than this; return whether it is over."""
        return self._over.wait(seconds)

    def wait(self, timeout: float | None = None) -> Path:
        """Return its folder once every process has written its part; raises if that failed or takes too long."""
        seconds = 2 * self.timeout if timeout is None else timeout
        if not self.ends_within(seconds):
            raise WaitTimeout(
                f"the checkpoint {self.path} is not whole after {seconds:g} s",
                expected="a disk that writes it in that time",
                fix="raise the pipeline's timeout, or save to a faster disk",
            )
        if self._error is not None:
            raise self._error
        return self.path


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded: the next step of training, the user's `extra`, and damaged checkpoints that were skipped."""

    path: Path
    step: int
    extra: Any = None
    skipped: tuple[str, ...] = field(default=())


@runtime_checkable
class Saves(Protocol):
    """Saves and loads all that training needs to continue; every rank calls it alike."""

    def save(
        self,
        folder: str | Path,
        *,
        step: int,
        extra: Any,
        keep: int | None,
        files: Mapping[str, str | bytes | Path | Maker],
        only: Collection[str] | None = None,
    ) -> Saving:
        """Begin a checkpoint of a step in a folder, with data and files of the caller's; `keep` of them stay.

        With `only`, it has these tensors of the model alone.
        """

    def load(self, folder: str | Path, *, missing_ok: bool) -> Loaded | None:
        """Continue from the newest whole checkpoint of a folder; None if it holds none and `missing_ok` allows that."""


def saves(pipe: object) -> Saves:
    """Return a pipeline as what saves it; refuse one to which nothing is attached that does.

    >>> saves(object())
    Traceback (most recent call last):
    drumline.core.errors.UsageError: nothing that saves checkpoints is attached to this pipeline; expected ...
    """
    if isinstance(pipe, Saves):
        return pipe
    raise UsageError(
        "nothing that saves checkpoints is attached to this pipeline",
        expected="a pipeline with `save` and `load`",
        fix="name the methods of features/saving in pipeline/attached.py",
    )
