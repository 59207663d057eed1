"""What can go wrong, as a tree: every error names the value, what was expected, and the mend.

DrumlineError            anything that Drumline refuses
├── ProgramError         text that is not a program, or a program used where it does not fit
│   └── InvalidProgram   a program that the validator refuses; carries every violation
├── ScheduleError        an unknown schedule, or counts that its recipe does not admit
├── CostsError           costs that do not fit the program, or make no sense
├── PlanError            what cannot be decided as asked: a cut or a program that no memory limit admits
├── UsageError           command-line input that no library call ever sees
├── ConfigError          a training config with wrong keys or values; carries every problem
├── ModelError           a model that cannot be cut as asked, or does not fit the program
├── TraceError           a profiler's trace that cannot be read, or traces that do not belong together
├── BatchError           a batch that cannot be cut into the microbatches
├── MismatchError        ranks that were not given the same thing
├── RecordError          a folder that holds no run, or files of one that cannot be read together
└── RunError             a run that failed
    ├── NonFiniteError   a loss or gradient that is NaN or infinite; nothing was updated
    ├── WaitTimeout      a rank waited too long; says for which action of which rank
    ├── LaunchError      local ranks that could not be started, or could not be handed what they need
    └── RankFailed       another rank failed; names it, its action and its error
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DrumlineError(ValueError):
    """A refusal that a user can act on: what is wrong, what was expected, how to mend it.

    >>> print(DrumlineError("M is 0", expected="a count of 1 or more", fix="pass --microbatches 8"))
    M is 0; expected a count of 1 or more; pass --microbatches 8
    """

    def __init__(self, error: str, *, expected: str = "", fix: str = "") -> None:
        self.error = error
        self.expected = expected
        self.fix = fix
        parts = [error, f"expected {expected}" if expected else "", fix]
        super().__init__("; ".join(part for part in parts if part))

    def __reduce__(self) -> tuple[object, ...]:
        """Travel between ranks with all three parts."""
        return _refused, (type(self), self.error, self.expected, self.fix), self.__dict__


class ProgramError(DrumlineError):
    """Text that is not a program, or a program used where it does not fit."""


class ScheduleError(DrumlineError):
    """An unknown schedule, or counts that its recipe does not admit."""


class CostsError(DrumlineError):
    """Costs that do not fit the program, or make no sense."""


class PlanError(DrumlineError):
    """What cannot be decided as asked; `smallest_bytes` is the memory limit that would do, where one was too small."""

    smallest_bytes: int | None = None


class UsageError(DrumlineError):
    """Command-line input that no library call ever sees."""


class ConfigError(DrumlineError):
    """A training config with wrong keys or values; `problems` has each as plain values: where, key, what to change."""

    problems: tuple[dict[str, str], ...] = ()


class ModelError(DrumlineError):
    """A model that cannot be cut as asked, or does not fit the program."""


class TraceError(DrumlineError):
    """A profiler's trace that cannot be read, or traces that do not belong together."""


class BatchError(DrumlineError):
    """A batch that cannot be cut into the microbatches."""


class MismatchError(DrumlineError):
    """Ranks that were not given the same schedule, model or settings."""


class RecordError(DrumlineError):
    """A folder that holds no run, or files of one that cannot be read together."""


class RunError(DrumlineError):
    """A run that failed on some rank."""


class NonFiniteError(RunError):
    """A loss or gradient is NaN or infinite; no optimizer state was changed."""


class WaitTimeout(RunError):
    """A rank waited too long for a named action of a named rank."""


class LaunchError(RunError):
    """Local ranks could not be started, or something cannot be sent to them or back; the text says what and where."""


class RankFailed(RunError):
    """Another rank failed; `rank` is the one, and the text names its action and its error."""

    def __init__(self, rank: int, error: str, *, expected: str = "", fix: str = "") -> None:
        self.rank = rank
        super().__init__(error, expected=expected, fix=fix)


def _refused(kind: type[DrumlineError], error: str, expected: str, fix: str) -> DrumlineError:
    made = kind.__new__(kind)
    DrumlineError.__init__(made, error, expected=expected, fix=fix)
    return made


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a half-sentence that suggests the closest known word, or lists them all.

    >>> nearest("1f1v", ["gpipe", "1f1b"])
    'did you mean 1f1b?'
    >>> nearest("a100", ["h100", "a100-40", "a100-80"])
    'did you mean a100-40 or a100-80?'
    >>> nearest("xyz", ["gpipe", "1f1b"])
    'choose one of gpipe, 1f1b'
    """
    words = {one.lower(): one for one in known}
    longer = [one for one in words if word and one.startswith(word.lower())]
    close = longer[:4] or difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(words[one] for one in close)}?"
    return f"choose one of {', '.join(words.values())}"


def installing(extra: str) -> str:
    """Return how to install an extra; from a clone, because the package is not published.

    >>> installing("train")
    "in your clone of Drumline, run: pip install -e '.[train]'"
    """
    return f"in your clone of Drumline, run: pip install -e '.[{extra}]'"


def counted(number: int, word: str) -> str:
    """Return a count with its word.

    >>> counted(1, "rank"), counted(2, "microbatch")
    ('1 rank', '2 microbatches')
    """
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number} {word}{ending}"
