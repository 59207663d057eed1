"""Aligned text tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 120, left: int = 1) -> str:
    """Return a table whose first `left` columns are flush left; lines are cut at `width`.

    >>> print(table(["name", "n"], [["gpipe", "8"], ["1f1b", "12"]]))
    name    n
    gpipe   8
    1f1b   12
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for cells in (header, *rows):
        padded = (
            cell.ljust(size) if at < left else cell.rjust(size)
            for at, (cell, size) in enumerate(zip(cells, widths, strict=True))
        )
        lines.append("  ".join(padded).rstrip()[:width])
    return "\n".join(lines)
