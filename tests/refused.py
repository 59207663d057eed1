"""Errors of ours are compared by their fields: what is wrong, what was expected, and how to fix it.

Each field is searched for a regular expression, so that a test names the value or the option it is about, and the
prose around it can change. `pytest.raises` stays where another package raises, or where the whole text is the point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from drumline.core.errors import DrumlineError

E = TypeVar("E", bound=DrumlineError)


@contextmanager
def refused(
    kind: type[E] | tuple[type[E], ...], error: str = "", *, expected: str = "", fix: str = ""
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of this kind whose fields match these regular expressions; yield what `pytest.raises` yields.

    >>> with refused(DrumlineError, "M is 0", fix="--microbatches") as caught:
    ...     raise DrumlineError("M is 0", expected="a count of 1 or more", fix="pass --microbatches 8")
    >>> caught.value.expected
    'a count of 1 or more'
    """
    __tracebackhide__ = True
    with pytest.raises(kind) as caught:
        yield caught
    patterns = saying(error, expected=expected, fix=fix)
    if missed := misses(caught.value, patterns):
        pytest.fail(_told(caught.value, patterns, missed))


def saying(error: str = "", *, expected: str = "", fix: str = "") -> dict[str, str]:
    """Return patterns of the fields for a table of cases; an empty one matches anything.

    >>> with refused(DrumlineError, **saying(fix="did you mean gpipe")):
    ...     raise DrumlineError("unknown schedule 'gpip'", fix="did you mean gpipe?")
    """
    return {"error": error, "expected": expected, "fix": fix}


def misses(raised: DrumlineError, patterns: dict[str, str]) -> list[str]:
    """Return the fields of an error that do not match their patterns.

    >>> misses(DrumlineError("M is 0", fix="pass M"), saying("M is 1", fix="pass"))
    ['error']
    """
    return [name for name, pattern in patterns.items() if not re.search(pattern, getattr(raised, name))]


def _told(raised: DrumlineError, patterns: dict[str, str], missed: list[str]) -> str:
    """Return all three fields of an error, and under each the pattern that it does not match.

    >>> raised = DrumlineError("M is 0", fix="pass M")
    >>> print(_told(raised, saying("M is 1"), ["error"]))
    DrumlineError does not match in error
      error: M is 0
        not: M is 1
      expected:
      fix: pass M
    """
    lines = [f"{type(raised).__name__} does not match in {', '.join(missed)}"]
    for name, pattern in patterns.items():
        lines.append(f"  {name}: {getattr(raised, name)}".rstrip())
        if name in missed:
            lines.append(f"    not: {pattern}")
    return "\n".join(lines)
