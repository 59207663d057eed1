"""What a setting accepts beyond its kind: bounds, choices, and the unit of its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value may be: a test, and what was expected in words; `choices` are names, for a near miss."""

    expected: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    unit: str = ""


def at_least(least: float, *, whole: bool = True, unit: str = "") -> Rule:
    """Return the rule of numbers from `least` on.

    >>> at_least(1, unit="steps").expected
    'a whole number of 1 or more'
    """
    kind = "a whole number" if whole else "a number"
    return Rule(f"{kind} of {least:g} or more", lambda value: bool(value >= least), unit=unit)


def above_0(*, unit: str = "") -> Rule:
    """Return the rule of numbers above 0.

    >>> above_0().holds(0), above_0().holds(0.1)
    (False, True)
    """
    return Rule("a number above 0", lambda value: bool(value > 0), unit=unit)


def one_of(*names: str) -> Rule:
    """Return the rule of names, one of which it must be.

    >>> one_of("none", "full").expected
    '"none" or "full"'
    """
    *others, last = [f'"{name}"' for name in names]
    return Rule(f"{', '.join(others)} or {last}", lambda value: value in names, names)


def each_at_least(least: int, *, unit: str = "") -> Rule:
    """Return the rule of lists of whole numbers from `least` on.

    >>> each_at_least(1).holds((3, 0))
    False
    """
    expected = f"whole numbers of {least} or more"
    return Rule(expected, lambda values: all(value >= least for value in values), unit=unit)


FREE = Rule("", lambda _: True)
COUNT, COUNT_OR_0 = at_least(1), at_least(0)
STEPS, STEPS_OR_0 = at_least(1, unit="steps"), at_least(0, unit="steps")
TOKENS = at_least(1, unit="tokens")
NUMBER_OR_0 = at_least(0, whole=False)
POSITIVE, BYTES = above_0(), above_0(unit="bytes")
SECONDS = Rule(
    "a number above 0 and at most 31536000, a year", lambda value: bool(0 < value <= 31_536_000), unit="seconds"
)
SHARE = Rule("a share, from 0 to 1", lambda value: 0 <= value <= 1)
PART = Rule("a share, from 0 to less than 1", lambda value: 0 <= value < 1)
