"""What others may ask of whoever keeps the journal of a run, if anybody does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Pieces(Protocol):
    """The time between two steps, in pieces that do not overlap."""

    def during(self, kind: str) -> AbstractContextManager[None]:
        """Count the time inside as `kind`."""

    def enter(self, kind: str) -> None:
        """Begin a piece."""

    def leave(self) -> None:
        """End the innermost piece."""


class Journal(Protocol):
    """Notes what happens in steps and between them."""

    notes_late: int  # how many steps later the metrics of a step may come

    @property
    def between(self) -> Pieces:
        """What this process does between steps."""

    def settle(self) -> None:
        """Wait for the outcome of all steps so far on all ranks."""

    def decided(self, step: int, line: Mapping[str, Any]) -> None:
        """Note a decision about the steps from here on."""

    def flush(self) -> None:
        """Have what was noted so far outlive this process."""

    def rewind(self) -> None:
        """Forget what was noted about steps that will run again."""

    def note(self, of_step: int | None = None, /, **metrics: Any) -> None:
        """Add metrics to a training step, the last one unless its number is given."""
