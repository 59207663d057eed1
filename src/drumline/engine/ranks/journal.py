"""The journal of a run: what happens in steps and between them. This class keeps none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from drumline.core.errors import RunError
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import TallyLedger
from drumline.runtime.step import Step

T = TypeVar("T")


class StepGap:
    """The time between two steps, in pieces that do not overlap; this class does not measure it."""

    def during(self, kind: str) -> AbstractContextManager[None]:
        """Count the time inside as `kind`."""
        return nullcontext()

    def enter(self, kind: str) -> None:
        """Begin a piece."""

    def leave(self) -> None:
        """End the innermost piece."""


class Journal(Observer):
    """Notes nothing; a subclass records steps. `gradients_left` says whether steps since the last update left any."""

    notes_late = 0  # how many steps later the metrics of a step may come

    def __init__(self, ledger: TallyLedger, gradients_left: Callable[[], bool]) -> None:
        self._ledger, self._gradients_left = ledger, gradients_left
        self.between = StepGap()  # what this process does between steps

    def settle(self) -> None:
        """Wait for the outcome of all steps so far on all ranks, and raise if one of them failed."""
        self._ledger.settle(until=None, gradients_left=self._gradients_left)

    def check(self) -> None:
        """Raise if nothing was recorded."""
        raise RunError("nothing was recorded: record=False", fix="create the pipeline with record=True or a folder")

    def evaluating(self, step: Step) -> None:
        """React to the beginning of a step that only evaluates."""

    def data(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the items of a loader, and measure the time until each arrives."""
        yield from loader

    def decided(self, step: int, line: Mapping[str, Any]) -> None:
        """Note a decision about the steps from here on."""

    def flush(self) -> None:
        """Have what was noted so far outlive this process."""

    def rewind(self) -> None:
        """Forget what was noted about steps that will run again."""

    def note(self, of_step: int | None = None, /, **metrics: Any) -> None:
        """Add metrics to a training step, the last one unless its number is given."""
