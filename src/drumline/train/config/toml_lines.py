"""In which line of a TOML file each key stands. The standard library's parser reads TOML and tells nothing of lines.

    [optimizer]                     ("optimizer",)                            1
    settings = { betas = [0.9,      ("optimizer", "settings"), (..., "betas") 2
                          0.95] }   (..., "betas", 1)                         3
    [[optimizer.groups]]            ("optimizer", "groups", 0)                5

So the parser reads the first lines of the text, and closes brackets and quotes that these leave open. A key is in the
last line of the fewest lines that have it.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

Path = tuple[str | int, ...]


def path_of(key: str) -> Path:
    """Return where a key stands in nested tables and lists.

    >>> path_of("optimizer.groups.0.lr")
    ('optimizer', 'groups', 0, 'lr')
    """
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


# What lines may leave open: a long string, then lists and tables around it.
_ENDS = [
    "".join((quotes, *brackets))
    for depth in range(5)
    for brackets in product("]}", repeat=depth)
    for quotes in ("", '"""', "'''")
]


def line_finder(text: str) -> Callable[[Path], int | None]:
    r"""Return what says in which line of a TOML text a table, key or item stands; None for one that is not there.

    The first line is 1; of a table that stands twice, the first counts.

    >>> line_of = line_finder("version = 1\n[batch]\nsequences = 8")
    >>> line_of(("version",)), line_of(("batch", "sequences")), line_of(("batch", "microbatch"))
    (1, 3, None)
    """
    lines = text.split("\n")

    @cache
    def read(count: int) -> dict[str, Any]:
        return _read("\n".join(lines[:count]) + "\n")

    def line_of(path: Path) -> int | None:
        if not _has(read(len(lines)), path):
            return None
        return 1 + bisect_left(range(1, len(lines) + 1), True, key=lambda count: _has(read(count), path))

    return line_of


def _read(beginning: str) -> dict[str, Any]:
    """Return what the beginning of a text spells; nothing where it leaves open more than could be closed."""
    for end in _ENDS:
        try:
            return tomllib.loads(beginning + end)
        except ValueError:
            continue
    return {}


def _has(value: Any, path: Path) -> bool:
    for part in path:
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
        if not is_there:
            return False
        value = value[part]
    return True
