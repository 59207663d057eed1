"""A broken rule, and the error for a program that breaks one or more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.core.action import Action
from drumline.core.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: where, which action, and why. `rank` or `index` is None if the action is missing.

    >>> print(Violation(1, 7, Action.parse("3B2"), "runs before 3F2"))
    rank 1, position 7: 3B2 runs before 3F2
    """

    rank: int | None
    index: int | None
    action: Action | None
    reason: str

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"position {self.index}"] if self.index is not None else []
        prefix = f"{', '.join(where)}: " if where else ""
        return f"{prefix}{'' if self.action is None else f'{self.action} '}{self.reason}"


class InvalidProgram(ProgramError):
    """The validator rejected the program. `violations` holds every reason, not only the first."""

    def __init__(self, name: str, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        super().__init__(
            f"program {name!r} cannot run: {violations[0]}{more}",
            expected="a program without violations",
            fix="run `drumline check FILE.csv` to list all of them",
        )
