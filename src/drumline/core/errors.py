"""The exception tree. Every error names the bad value, says what was expected, and how to fix it.

::

    DrumlineError            base class of all errors that Drumline raises
    ├── ProgramError         the text is not a program, or the program does not fit here
    │   └── InvalidProgram   the validator rejected a program; holds every violation
    ├── ScheduleError        unknown schedule, or counts that the schedule does not support
    ├── CostsError           costs do not fit the program, or make no sense
    ├── PlanError            no answer exists: for example no cut or program fits the memory limit
    ├── UsageError           a flag or argument makes no sense
    │   └── NotInstalled     a package is missing that an extra brings; an ImportError, too
    ├── ConfigError          a training config has wrong keys or values; holds every problem
    ├── ModelError           the model cannot be cut as asked, or does not fit the program
    ├── TraceError           a profiler trace cannot be read, or traces do not belong together
    ├── BatchError           the batch cannot be split into the microbatches
    ├── MismatchError        ranks were given different things
    ├── RecordError          a folder holds no run, or its files cannot be read together
    └── RunError             a run failed
        ├── NonFiniteError   a loss or gradient is NaN or infinite; nothing was updated
        ├── WaitTimeout      a rank waited too long; names the action and rank it waited for
        ├── LaunchError      local ranks could not start, or could not receive what they need
        └── RankFailed       another rank failed; names the rank, its action and its error
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DrumlineError(ValueError):
    """An error that a user can act on: what is wrong, what was expected, how to fix it.

    >>> print(DrumlineError("M is 0", expected="a count of 1 or more", fix="pass --microbatches 8"))
    M is 0; expected a count of 1 or more; pass --microbatches 8
    """

    key: str = ""  # of a training config that it is about, if it is about one

    def __init__(self, error: str, *, expected: str = "", fix: str = "") -> None:
        self.error = error
        self.expected = expected
        self.fix = fix
        parts = [error, f"expected {expected}" if expected else "", fix]
        super().__init__("; ".join(part for part in parts if part))

    def __reduce__(self) -> tuple[object, ...]:
        """Keep all three parts when pickled between ranks."""
        return _refused, (type(self), self.error, self.expected, self.fix), self.__dict__


class ProgramError(DrumlineError):
    """The text is not a program, or the program does not fit here."""


class ScheduleError(DrumlineError):
    """The schedule is unknown, or does not support the given counts."""


class CostsError(DrumlineError):
    """The costs do not fit the program, or make no sense."""


class PlanError(DrumlineError):
    """No answer exists. If the memory limit was too small, `smallest_bytes` is the smallest limit that works."""

    smallest_bytes: int | None = None


class UsageError(DrumlineError):
    """A flag or argument makes no sense; raised before anything runs."""


class NotInstalled(UsageError, ModuleNotFoundError):
    """A package is missing that one of Drumline's extras brings; `name` says which, as an ImportError does."""

    @classmethod
    def torch(cls, what: str) -> NotInstalled:
        """Return the error for something that needs PyTorch.

        >>> print(NotInstalled.torch("drumline.Pipeline needs PyTorch"))
        drumline.Pipeline needs PyTorch; in your clone of Drumline, run: pip install -e '.[train]'
        """
        error = cls(what, fix=installing("train"))
        error.name = "torch"
        return error


class ConfigError(DrumlineError):
    """A training config with wrong keys or values; `problems` has each as plain values: where, key, what to change."""

    problems: tuple[dict[str, str], ...] = ()


class ModelError(DrumlineError):
    """The model cannot be cut as asked, or does not fit the program."""


class TraceError(DrumlineError):
    """A profiler trace cannot be read, or traces do not belong together."""


class BatchError(DrumlineError):
    """The batch cannot be split into the microbatches."""


class MismatchError(DrumlineError):
    """Ranks were given different schedules, models or settings."""


class RecordError(DrumlineError):
    """A folder holds no run, or the files of a run cannot be read together."""


class RunError(DrumlineError):
    """A run failed on some rank."""


class NonFiniteError(RunError):
    """A loss or gradient is NaN or infinite; no optimizer state was changed."""


class WaitTimeout(RunError):
    """A rank waited too long for a named action of a named rank."""


class LaunchError(RunError):
    """Local ranks could not start, or something cannot be sent to or from them; the text says what and where."""


class RankFailed(RunError):
    """Another rank failed: `rank` says which, and the text names its action and its error."""

    def __init__(self, rank: int, error: str, *, expected: str = "", fix: str = "") -> None:
        self.rank = rank
        super().__init__(error, expected=expected, fix=fix)


def _refused(kind: type[DrumlineError], error: str, expected: str, fix: str) -> DrumlineError:
    drumline_error = kind.__new__(kind)
    DrumlineError.__init__(drumline_error, error, expected=expected, fix=fix)
    return drumline_error


def refuse(*rows: tuple[object, str, str, str], kind: type[DrumlineError] = UsageError) -> None:
    """Raise the first row that holds: whether it does, what is wrong, what was expected, and how to fix it.

    >>> refuse((False, "M is 0", "a count of 1 or more", "pass --microbatches 8"))
    """
    for holds, error, expected, fix in rows:
        if holds:
            raise kind(error, expected=expected, fix=fix)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a phrase that suggests the closest known word, or lists all of them.

    >>> nearest("1f1v", ["gpipe", "1f1b"])
    'did you mean 1f1b?'
    >>> nearest("a100", ["h100", "a100-40", "a100-80"])
    'did you mean a100-40 or a100-80?'
    >>> nearest("xyz", ["gpipe", "1f1b"])
    'choose one of gpipe, 1f1b'
    >>> nearest("xyz", [])
    ''
    """
    words = {name.lower(): name for name in known}
    longer = [name for name in words if word and name.startswith(word.lower())]
    close = longer[:4] or difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(words[name] for name in close)}?"
    return f"choose one of {', '.join(words.values())}" if words else ""


def installing(extra: str) -> str:
    """Return how to install an extra from a clone, because the package is not published yet.

    >>> installing("train")
    "in your clone of Drumline, run: pip install -e '.[train]'"
    """
    return f"in your clone of Drumline, run: pip install -e '.[{extra}]'"


def counted(number: int, word: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "rank"), counted(2, "microbatch")
    ('1 rank', '2 microbatches')
    """
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number} {word}{ending}"
