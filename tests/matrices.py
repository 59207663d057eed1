"""Tests over all combinations of several things: `make matrices` runs them all, other runs as many as can fail alone.

Of what is drawn at random `make test` tries a third and `make quick` a fifth; of combinations `make quick` tries fewer.

A fault is nearly always one of a value (this model, this schedule) or of a pair of them. So of each axis every value
occurs, in two different companies; all combinations take ten times as long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
ALL = "ALL_CASES" in os.environ
FEW = "FEW_CASES" in os.environ
# One schedule of every kind: of every placement, with whole and with split backwards, in one direction and in two.
KINDS = ("1f1b", "interleaved-zb", "zb-v", "hanayo", "chimera", "dualpipe")


def long(test: Any) -> Any:
    """Leave a test to `make matrices`: what it shows is shown more briefly elsewhere, or by `make faults`."""
    reason = "make matrices runs it"
    return pytest.mark.matrix(pytest.mark.skipif(not ALL, reason=reason)(test))


def left(*values: Any) -> list[Any]:
    """Leave values of a parameter to `make matrices`."""
    marks = [pytest.mark.matrix, pytest.mark.skipif(not ALL, reason="make matrices runs it")]
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks) for value in values]


def mainly(names: str | tuple[str, ...], first: Any, *others: Any) -> Callable[[Any], Any]:
    """Parametrise a test with its first value; the others are left to `make matrices`."""
    return pytest.mark.parametrize(names, [first, *left(*others)])


def matrix(names: str, *axes: Iterable[Any], times: int = 2, later: Sequence[Any] = ()) -> Callable[[Any], Any]:
    """Parametrise a test with all combinations, or with so many that each value of the longest axis occurs `times`.

    Combinations with one of the values `later` are left to `make matrices`.
    """
    cells = [cell for cell in chosen(*axes, times=times) if ALL or not any(value in later for value in cell)]
    ids = ["-".join(getattr(value, "__name__", str(value)) for value in cell) for cell in cells]

    def decorate(test: Any) -> Any:
        return pytest.mark.matrix(pytest.mark.parametrize(names, cells, ids=ids)(test))

    return decorate


def chosen(*axes: Iterable[Any], times: int = 2) -> list[tuple[Any, ...]]:
    """Return the combinations that `matrix` tries, for a test that goes through them by itself."""
    values = [list(axis) for axis in axes]
    if ALL or not all(values):
        return list(product(*values))
    return thinned(values, 1 if FEW else times)


def thinned(axes: Sequence[Sequence[Any]], times: int) -> list[tuple[Any, ...]]:
    """Return diagonals through a matrix, no cell twice.

    >>> thinned([["a", "b", "c"], [2, 4]], 1)
    [('a', 2), ('b', 4), ('c', 2)]
    """
    longest = max(len(axis) for axis in axes)
    cells = [
        tuple(axis[(at + turn * number) % len(axis)] for number, axis in enumerate(axes))
        for turn in range(times)
        for at in range(longest)
    ]
    return list(dict.fromkeys(cells))


def examples(count: int) -> int:
    """Return how many random examples to try: in `make matrices` all, else a third, in the quick half a fifth."""
    return count if ALL else max(count // (5 if FEW else 3), 1)


def kinds(names: Sequence[str]) -> list[str]:
    """Return the names of all schedules that are given, or in the quick half those that stand for the others."""
    return [name for name in names if not FEW or name in KINDS]


def some_of(values: Sequence[T], kept: Iterable[T]) -> list[T]:
    """Return all values, or those that stand for the others."""
    chosen = set(kept)
    assert chosen <= set(values), chosen - set(values)
    return [value for value in values if ALL or value in chosen]
