"""Clashes as data: two options of a run, why they clash, and how to fix that.

    Clash(fact("capture"), fact("adapt"), "one of the two", "the actions of a captured step have no times")

    capture is True, and adapt is True; expected one of the two: the actions of a captured step have no times

Facts are options by name, and what else is known of a run: its mesh, its program, what is called. Whoever refuses
spells options in its own way: as arguments in Python, or as the keys of a config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.core.errors import DrumlineError, UsageError

Facts = Mapping[str, Any]


class Spelling:
    """How errors write options: here, as arguments in Python."""

    def is_now(self, option: str, value: Any) -> str:
        """Return what an option is."""
        return f"{option} is {repr(value) if isinstance(value, bool | int | float | str) else 'set'}"

    def use(self, option: str, value: Any) -> str:
        """Return how to set an option."""
        return f"use {option}={value!r}"


@dataclass(frozen=True, slots=True)
class Given:
    """One half of a clash: an option with a value, a property of the mesh or the program, or a call.

    `option` is the one to change, and `shown` what the documentation calls it. Errors use `words`, with facts in them,
    or else say what the option is.
    """

    option: str
    shown: str
    holds: Callable[[Facts], bool]
    words: str = ""

    def said(self, facts: Facts, spelling: Spelling) -> str:
        """Return what holds, in words."""
        return self.words.format_map(facts) if self.words else spelling.is_now(self.option, facts[self.option])


def fact(option: str, *values: Any) -> Given:
    """Return an option that has one of these values; without any, one that is set.

    >>> fact("record", False).shown, fact("record", False).holds({"record": True})
    ('`record=False`', False)
    """
    shown = [f"`{option}={value!r}`".replace("'", '"') for value in values]

    def holds(facts: Facts) -> bool:
        value = facts.get(option)
        return value in values if values else bool(value)

    return Given(option, " or ".join(shown) or f"`{option}`", holds)


def call(method: str) -> Given:
    """Return the call of a method.

    >>> call("repartition").holds({"call": "repartition"})
    True
    """
    return Given("call", f"`{method}`", lambda facts: facts.get("call") == method, f"{method} was called")


@dataclass(frozen=True, slots=True)
class Clash:
    """Two options that clash: what was expected instead, why, and an option's value or words that fix it.

    >>> clash = Clash(fact("capture"), fact("adapt"), "one of the two", use=("capture", False))
    >>> print(clash.refusal({"capture": True, "adapt": True}))
    capture is True, and adapt is True; expected one of the two; use capture=False
    """

    first: Given
    other: Given
    expected: str
    why: str = ""
    use: tuple[str, Any] | None = None
    fix: str = ""
    kind: type[DrumlineError] = UsageError

    def holds(self, facts: Facts) -> bool:
        """Whether both are there."""
        return self.first.holds(facts) and self.other.holds(facts)

    def refusal(self, facts: Facts, spelling: Spelling | None = None) -> DrumlineError:
        """Return the error that tells it."""
        spelled = spelling or Spelling()
        return self.kind(
            f"{self.first.said(facts, spelled)}, and {self.other.said(facts, spelled)}",
            expected=f"{self.expected}: {self.why}" if self.why else self.expected,
            fix=spelled.use(*self.use) if self.use else self.fix.format_map(facts),
        )


def clashes_in(clashes: Iterable[Clash], facts: Facts) -> Iterator[Clash]:
    """Yield the clashes that these facts have."""
    return (clash for clash in clashes if clash.holds(facts))


@dataclass(frozen=True, slots=True)
class Together:
    """What is known of one run, and all that could clash in it."""

    clashes: tuple[Clash, ...]
    facts: Facts

    def refuse(self, **more: Any) -> None:
        """Raise the first clash between what is known, and what more is asked for."""
        facts = {**self.facts, **more}
        for clash in clashes_in(self.clashes, facts):
            raise clash.refusal(facts)
