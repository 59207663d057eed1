"""What neither checks nor recomputation put back: nobody who looks at what blocks keep sees into it."""

from __future__ import annotations

from ctypes import c_long, py_object
from typing import Any


class Tally:
    """Counts its calls.

    >>> calls = Tally()
    >>> calls(), calls(), calls.count
    (0, 1, 2)
    """

    def __init__(self) -> None:
        self._calls = c_long()

    def __call__(self) -> int:
        """Return how often it was called before."""
        self._calls.value += 1
        return self._calls.value - 1

    @property
    def count(self) -> int:
        """How often it was called."""
        return self._calls.value


class Notes:
    """A list that nothing puts back either.

    >>> notes = Notes()
    >>> notes.add(2.0)
    >>> notes.rows
    [2.0]
    """

    def __init__(self) -> None:
        self._rows: py_object[list[Any]] = py_object([])

    def add(self, item: Any) -> None:
        """Add an item."""
        self.rows.append(item)

    @property
    def rows(self) -> list[Any]:
        """What was added."""
        rows: list[Any] = self._rows.value
        return rows
