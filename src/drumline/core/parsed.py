"""Values of a JSON file, each with its position, so that an error names the value that is not a number or text.

::

    plan["seconds"]["bubble"].number()    0.25
    plan["counts"].each()[3].whole(1)     a damaged plan: counts[3] is 'four'; expected a whole number of 1 or more
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from drumline.core.errors import DrumlineError, nearest
from drumline.core.files import FileKind

# Sums and products of a million numbers up to this limit are still finite.
LARGEST = 1e100
MOST = 2**53  # whole numbers up to this limit are exact as floats

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: object) -> str:
    """Return a value, shortened for display.

    >>> shown([[1, 2]] * 1000)
    '[[1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2], ...]'
    """
    return _SHORT.repr(value)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A value, its position, and the kind of file it comes from.

    >>> kind = FileKind("plan", DrumlineError, "a JSON file")
    >>> plan = Parsed({"batch": 8, "cuts": ["a", 4]}, kind)
    >>> plan["batch"].whole()
    8
    >>> [value.text() for value in plan["cuts"].each()]
    Traceback (most recent call last):
    drumline.core.errors.DrumlineError: a damaged plan: cuts[1] is 4; expected text; ...
    >>> plan["seconds"]
    Traceback (most recent call last):
    drumline.core.errors.DrumlineError: a damaged plan: 'seconds' is missing; expected a JSON file
    """

    value: Any
    kind: FileKind
    where: str = ""

    def refuse(self, expected: str) -> DrumlineError:
        """Return the error to raise when the value is not what was expected."""
        return self.kind.error(
            f"a damaged {self.kind.name}: {self.where or 'it'} is {shown(self.value)}",
            expected=expected,
            fix=f"pass {self.kind.expected}",
        )

    def __getitem__(self, name: str) -> Parsed:
        content = self.get(name)
        if content is None:
            raise self.kind.refuse(f"a damaged {self.kind.name}: {self._inside(name)!r} is missing")
        return content

    def get(self, name: str) -> Parsed | None:
        """Return a field of an object, or None if it is missing; null is a value."""
        if not isinstance(self.value, dict):
            raise self.refuse("an object")
        return Parsed(self.value[name], self.kind, self._inside(name)) if name in self.value else None

    def only(self, known: Iterable[str]) -> Parsed:
        """Return the object itself, after rejecting unknown names."""
        known = list(known)
        if not isinstance(self.value, dict):
            raise self.refuse("an object")
        for name in self.value:
            if name not in known:
                raise self.kind.error(
                    f"a damaged {self.kind.name}: unknown name {self._inside(name[:60])!r}",
                    expected=self.kind.expected,
                    fix=nearest(name[:60], known),
                )
        return self

    def each(self, *, most: int = 10**6) -> list[Parsed]:
        """Return the items of a list."""
        if not isinstance(self.value, list) or len(self.value) > most:
            raise self.refuse(f"a list of at most {most} items" if isinstance(self.value, list) else "a list")
        return [Parsed(value, self.kind, f"{self.where}[{at}]") for at, value in enumerate(self.value)]

    def text(self) -> str:
        """Return the value, which must be text."""
        if not isinstance(self.value, str):
            raise self.refuse("text")
        return self.value

    def flag(self) -> bool:
        """Return the value, which must be a bool."""
        if not isinstance(self.value, bool):
            raise self.refuse("true or false")
        return self.value

    def whole(self, least: int = 0, most: int = MOST) -> int:
        """Return the value, which must be a whole number; 2.0 is not."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.refuse(f"a whole number {_within(least, most, MOST)}")
        return self.value

    def number(self, least: float = 0.0, most: float = LARGEST) -> float:
        """Return the value, which must be a number, whole or not."""
        value = self.value
        if type(value) not in (int, float) or not least <= value <= most or not math.isfinite(value):
            raise self.refuse(f"a number {_within(least, most, LARGEST)}")
        return value  # type: ignore[no-any-return]

    def _inside(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name


def _within(least: float, most: float, usual: float) -> str:
    return f"of {least:g} or more" if most >= usual else f"from {least:g} to {most:g}"
