"""Aligned text tables that never mislead where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 120, left: int = 1) -> str:
    """Return a table whose first `left` columns are flush left.

    Where it is too wide, headings break at spaces; then a last column that is text is shortened with an ellipsis, or
    columns of numbers are left out from the right and the table says how many.

    >>> print(table(["name", "n"], [["gpipe", "8"], ["1f1b", "12"]]))
    name    n
    gpipe   8
    1f1b   12
    >>> print(table(["name", "long heading"], [["gpipe", "8"]], width=15))
              long
    name   heading
    gpipe        8
    """
    headings = [[heading] for heading in header]
    if _width(headings, rows) > width:
        headings = [[heading] if at < left else heading.split(" ") for at, heading in enumerate(header)]
    shown = len(header)
    while shown > max(left, 1) and _width(headings[:shown], rows) > width:
        shown -= 1
    headings, cells = headings[:shown], [list(row[:shown]) for row in rows]
    excess = _width(headings, cells) - width
    if excess > 0:
        cells = [[*row[:-1], _shortened(row[-1], _longest(cells, -1) - excess)] for row in cells]
    height = max(map(len, headings))
    lines = [[""] * (height - len(heading)) + heading for heading in headings]
    sizes = [max(map(len, column)) for column in zip(*zip(*lines, strict=True), *cells, strict=True)]
    text = [_line(row, sizes, left) for row in (*zip(*lines, strict=True), *cells)]
    if shown < len(header):
        hidden = len(header) - shown
        text.append(f"({hidden} more column{'s' if hidden > 1 else ''} in a wider terminal)"[:width])
    return "\n".join(line[:width] for line in text)


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
