"""A setting: a field of a dataclass that states its default, its meaning and what it accepts.

    class RunSettings:
        steps: int = setting(100, "optimizer steps", COUNT)
        threads: int | None = setting(None, "threads of each rank", COUNT, empty="cores / local ranks")

Whoever reads, writes, checks or describes settings asks `settings_of(RunSettings)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from drumline.core.settings.kinds import Wrong, in_kind
from drumline.core.settings.rule import FREE, Rule

_T = TypeVar("_T")
_WORDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", dict: "a table"}
_EMPTY = {str: '""', tuple: "none"}


def setting(default: _T, meaning: str, rule: Rule = FREE, *, empty: str = "") -> _T:
    """Return a dataclass field with its default, its meaning and what it accepts.

    `empty` says what happens if the value is None, "", 0 or an empty list.

    >>> @dataclass
    ... class Greeting:
    ...     name: str = setting("", "whom to greet", empty="everybody")
    >>> settings_of(Greeting)["name"].meaning
    'whom to greet; "": everybody'
    """
    new_setting: Any = field(metadata={"meaning": meaning, "rule": rule, "empty": empty}, **_defaulted(default))
    return new_setting  # type: ignore[no-any-return]


def _defaulted(default: Any) -> dict[str, Any]:
    return {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}


def same_as(owner: type, name: str) -> Any:
    """Return a dataclass field that is the same setting as another class's."""
    entry = next(entry for entry in fields(owner) if entry.name == name)
    return field(default=entry.default, metadata=entry.metadata)


def table(make: Callable[[], _T], meaning: str) -> _T:
    """Return a dataclass field that holds settings of another class."""
    whole: Any = field(default_factory=make, metadata={"meaning": meaning})
    return whole  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its table, name, kind of value (as Python spells it), default, meaning and rule."""

    table: str
    name: str
    kind: Any
    default: Any
    short: str  # its meaning, without what an empty value does
    rule: Rule
    empty: str

    @property
    def path(self) -> str:
        """The table and the name."""
        return f"{self.table}.{self.name}"

    @property
    def meaning(self) -> str:
        """What it means, and what an empty value does."""
        return f"{self.short}; {self._empty_word}: {self.empty}" if self.empty else self.short

    @property
    def _empty_word(self) -> str:
        return "not set" if self.is_optional else _EMPTY.get(get_origin(self.kind) or self.kind, "0")

    @property
    def is_optional(self) -> bool:
        """Whether it may be left unset, so that something else decides."""
        return type(None) in get_args(self.kind)

    @property
    def inner(self) -> Any:
        """The kind of a value that is set."""
        return next(arg for arg in get_args(self.kind) if arg is not type(None)) if self.is_optional else self.kind

    @property
    def takes_text(self) -> bool:
        """Whether a value may be a string."""
        return self.inner is str or (get_origin(self.inner) in (Union, UnionType) and str in get_args(self.inner))

    @property
    def expected(self) -> str:
        """What it may be, in words."""
        return self.rule.expected or self._kind_word

    @property
    def _kind_word(self) -> str:
        if get_origin(self.inner) is tuple:
            return {str: "a list of strings", int: "a list of whole numbers"}.get(get_args(self.inner)[0], "tables")
        return _WORDS.get(get_origin(self.inner) or self.inner, "a value")

    def taken(self, value: Any) -> Any:
        """Return a value in the kind of the setting, or raise Wrong."""
        if value is None and self.is_optional:
            return None
        try:
            value_in_kind = in_kind(self.inner, value)
            if self.rule.holds(value_in_kind):
                return value_in_kind
        except Wrong:
            pass
        raise Wrong(self.expected)


@cache
def settings_of(owner: type, table: str = "") -> dict[str, Setting]:
    """Return the settings of a dataclass by name; `table` is what users call it."""
    hints = get_type_hints(owner)
    return {entry.name: _setting(entry, hints[entry.name], table) for entry in fields(owner)}


def _setting(entry: Field[Any], kind: Any, table: str) -> Setting:
    default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
    return Setting(
        table, entry.name, kind, default, entry.metadata["meaning"], entry.metadata["rule"], entry.metadata["empty"]
    )
