"""A move: layers went from rank to rank between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Move:
    """One repartition, the same on every rank.

    `step` is the first step after it. `before` and `after` are the cuts: the names of the first blocks of stages 1, 2,
    ... `bytes_moved` counts all ranks of a line. `seconds` are those of the slowest rank in each part: "agree", "send",
    "rebuild".

    >>> move = Move(7, ("4",), ("3",), (4, 4), (3, 5), "1f1b", "1f1b", "", "", 1000, {"send": 0.25, "agree": 0.25})
    >>> move.total_seconds, move.to_json()["after"]
    (0.5, ['3'])
    """

    step: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    balance_before: tuple[int, ...]  # the number of blocks in each stage
    balance_after: tuple[int, ...]
    program_before: str  # the name of the program
    program_after: str
    text_before: str  # the program itself
    text_after: str
    bytes_moved: int
    seconds: Mapping[str, float]

    @property
    def total_seconds(self) -> float:
        """The pause between the two steps, in seconds."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; of programs that stay the same only the name."""
        table = {name: list(entry) if isinstance(entry, tuple) else entry for name, entry in asdict(self).items()}
        if self.text_before == self.text_after:
            del table["text_before"], table["text_after"]
        return table
