"""The line of a run: which checkpoints led to a state, where a run was taken up again from an earlier one.

    step  2     4     6     8          saved in one go: line 5f3a
          ●─────●─────○─────○
                └──●───────●           4 was loaded, and training continued: line 77ab, after 5f3a up to 4
                   5       7
          ● of the line 77ab           ○ left: later steps of 5f3a, which did not lead here

A line has a name that is drawn when its first checkpoint is saved. Every manifest says which lines came before, each up
to which step. So a checkpoint that is removed leaves no gap, and no clock is asked. On a line, later steps were saved
later: to save a smaller step than before begins another line. Checkpoints of earlier versions have the line "".
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Part = tuple[str, int | None]  # a line's name, and the step at which it was left; None where it continues
_MOST = 64  # lines before; what is older than so many resumptions counts as another run's


@dataclass(frozen=True, slots=True)
class Lineage:
    """The parts of a line, oldest first.

    >>> first = Lineage().going_on("5f3a")
    >>> then = first.left_at(4).going_on("77ab")
    >>> then.holds(first, 4), then.holds(first, 6), then.holds(then, 6), first.holds(then, 5)
    (True, False, True, False)
    >>> then.is_kin(first), then.is_kin(Lineage().going_on("0000"))
    (True, False)
    """

    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Lineage:
        """Return the line of a checkpoint, from what its manifest says."""
        return cls(tuple((name, until) for name, until in content.get("line") or [("", None)]))

    @property
    def is_open(self) -> bool:
        """Whether checkpoints may be added to it."""
        return bool(self.parts) and self.parts[-1][1] is None

    def holds(self, line: Lineage, step: int) -> bool:
        """Whether a checkpoint of a line and step led here."""
        return any(name == line.parts[-1][0] and (until is None or step <= until) for name, until in self.parts)

    def is_kin(self, line: Lineage) -> bool:
        """Whether another line is of the same run: both have a part in common."""
        return not {name for name, _ in self.parts}.isdisjoint(name for name, _ in line.parts)

    def left_at(self, step: int) -> Lineage:
        """Return the line up to a step."""
        return Lineage(tuple((name, step if until is None else min(until, step)) for name, until in self.parts))

    def going_on(self, name: str) -> Lineage:
        """Return a line that continues after this one."""
        return Lineage((*self.parts[-_MOST:], (name, None)))


@dataclass(slots=True)
class Course:
    """The line of a pipeline while it trains: what it has loaded, and saved since, folder by folder.

    Folders may count steps each in its own way, such as one for every hour and one for the best so far.
    """

    line: Lineage = field(default_factory=Lineage)  # up to what was loaded
    name: str = ""  # of the line that continues after that
    folders: dict[str, tuple[Lineage, int]] = field(default_factory=dict)  # the line and the last step in each

    def loaded(self, checkpoint: Path, content: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.line, self.name = Lineage.of(content).left_at(content["step"]), ""
        self.folders = {os.path.abspath(checkpoint.parent): (self.line, content["step"])}

    def saving(self, folder: str | Path, step: int) -> Lineage:
        """Return the line of a checkpoint that is about to be saved.

        >>> course = Course()
        >>> value, two, best, three = (course.saving(*at) for at in (("a", 2), ("a", 4), ("best", 1), ("a", 3)))
        >>> value == two == best, three.holds(value, 2), three.holds(two, 4)
        (True, True, False)
        """
        place = os.path.abspath(folder)
        line, last = self.folders.get(place, (self.line, -1))
        if step < last:
            line = line.left_at(step - 1).going_on(secrets.token_hex(4))
        if not line.is_open:
            self.name = self.name or secrets.token_hex(4)
            line = line.going_on(self.name)
        self.folders[place] = line, step
        return line
