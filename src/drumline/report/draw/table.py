"""Aligned text tables that stay correct if they do not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BREAKS = re.compile(" "), re.compile(r" |(?<=/)")

# Fewer characters do not identify anything.
_FEWEST = 8


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 120, left: int = 1, keep: Sequence[str] = ()
) -> str:
    """Return a table whose first `left` columns are left-aligned.

    If it is too wide, headings break at spaces, and then after slashes. Next, columns are dropped from the right, those
    in `keep` last, and the table says how many. Then the last column is shortened with an ellipsis. The first column is
    shortened before a column in `keep` is dropped.

    >>> print(table(["name", "n"], [["gpipe", "8"], ["1f1b", "12"]]))
    name    n
    gpipe   8
    1f1b   12
    >>> print(table(["name", "long heading"], [["gpipe", "8"]], width=15))
              long
    name   heading
    gpipe        8
    >>> print(table(["name", "stages", "idle"], [["interleaved", "4", "8%"]], width=24, keep=["idle"]))
    name         idle
    interleaved    8%
    (1 more column in a wide
    """
    headings = [[heading] for heading in header]
    for breaks in _BREAKS:
        if _width(headings, rows) > width:
            headings = [[heading] if at < left else breaks.split(heading) for at, heading in enumerate(header)]
    shown = _shown(header, headings, rows, width, 1 if keep else max(left, 1), keep)
    left = sum(at < left for at in shown)
    headings, cells = [headings[at] for at in shown], [[row[at] for at in shown] for row in rows]
    excess = _width(headings, cells) - width
    if excess > 0:
        at = 0 if header[shown[-1]] in keep else -1
        size = _longest(cells, at) - excess
        for row in cells:
            row[at] = _shortened(row[at], size)
    height = max(map(len, headings))
    lines = [[""] * (height - len(heading)) + heading for heading in headings]
    sizes = [max(map(len, column)) for column in zip(*zip(*lines, strict=True), *cells, strict=True)]
    text = [_line(row, sizes, left) for row in (*zip(*lines, strict=True), *cells)]
    if len(shown) < len(header):
        hidden = len(header) - len(shown)
        text.append(f"({hidden} more column{'s' if hidden > 1 else ''} in a wider terminal)"[:width])
    return "\n".join(line[:width] for line in text)


def _shown(
    header: Sequence[str],
    headings: Sequence[Sequence[str]],
    rows: Sequence[Sequence[str]],
    width: int,
    fixed: int,
    keep: Sequence[str],
) -> list[int]:
    """Return the columns that fit; always the first `fixed` ones, and those to keep with a shorter name."""
    shown = list(range(len(header)))

    def excess_of(columns: Sequence[int]) -> int:
        return _width([headings[column] for column in columns], [[row[col] for col in columns] for row in rows]) - width

    for at in sorted(shown[fixed:], key=lambda at: (header[at] in keep, -at)):
        excess = excess_of(shown)
        if header[at] in keep:
            excess -= max(_longest(rows, 0) - _FEWEST, 0)
        if excess <= 0:
            break
        shown.remove(at)
    for at in range(len(header)):  # where a column to keep had to go, others have room again
        if at not in shown and excess_of([*shown, at]) <= 0:
            shown = sorted([*shown, at])
    return shown


def _line(cells: Sequence[str], sizes: Sequence[int], left: int) -> str:
    padded = (
        cell.ljust(size) if at < left else cell.rjust(size)
        for at, (cell, size) in enumerate(zip(cells, sizes, strict=True))
    )
    return "  ".join(padded).rstrip()


def _width(headings: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> int:
    columns = [max([*map(len, heading), _longest(rows, at)]) for at, heading in enumerate(headings)]
    return sum(columns) + 2 * (len(columns) - 1)


def _longest(rows: Sequence[Sequence[str]], at: int) -> int:
    return max((len(row[at]) for row in rows), default=0)


def _shortened(text: str, size: int) -> str:
    return text if len(text) <= size else text[: max(size - 3, 0)].rstrip() + "..."
