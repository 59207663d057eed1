"""What a check goes through must be there: a loop over nothing proves nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def some(values: Iterable[T]) -> list[T]:
    """Return the values, of which there must be at least one."""
    found = list(values)
    assert found, "there is nothing to check"
    return found
