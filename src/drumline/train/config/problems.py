"""What is wrong with a config: all of it at once, each with its file, line and key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from drumline.core.errors import ConfigError, DrumlineError, counted

_SAYS = ("is", "has", "sums", "stands", "asks")  # with these a key is the subject of a sentence


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it was given, the key, what is wrong with it, and the fix.

    >>> print(Problem("mine.toml, line 3", "batch.sequense", "unknown key", fix="did you mean sequence?"))
    mine.toml, line 3: batch.sequense: unknown key; did you mean sequence?
    """

    where: str
    key: str
    error: str
    expected: str = ""
    fix: str = ""

    @staticmethod
    def of(where: str, key: str, error: DrumlineError) -> Problem:
        """Return the problem that another part of Drumline found."""
        return Problem(where, key, error.error, error.expected, error.fix)

    @property
    def headline(self) -> str:
        """Where, which key, and what is wrong."""
        says = self.error.partition(" ")[0] in _SAYS
        what = f"{self.key} {self.error}" if self.key and says else ": ".join(filter(None, (self.key, self.error)))
        return f"{self.where}: {what}" if self.where and self.where != self.key else what

    def __str__(self) -> str:
        parts = [self.headline, f"expected {self.expected}" if self.expected else "", self.fix]
        return "; ".join(part for part in parts if part)


def refused(problems: Sequence[Problem]) -> ConfigError:
    """Return the error that tells all problems.

    >>> print(refused([Problem("--steps", "run.steps", "is 0", "a whole number of 1 or more")]))
    --steps: run.steps is 0; expected a whole number of 1 or more
    """
    if len(problems) == 1:
        problem = problems[0]
        error = ConfigError(problem.headline, expected=problem.expected, fix=problem.fix)
    else:
        listed = "".join(f"\n  {problem}" for problem in problems)
        error = ConfigError(f"{counted(len(problems), 'problem')} in the settings:{listed}")
    error.problems = tuple(asdict(problem) for problem in problems)
    return error
