"""From raw tables to settings: unknown keys, wrong kinds and values out of range become problems, all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin

from drumline.core.errors import nearest
from drumline.core.parsed import shown
from drumline.train.config.keys import TABLES, Key, keys
from drumline.train.config.lines import Path
from drumline.train.config.problems import Problem
from drumline.train.config.settings import OptimizerGroup, TrainSettings

GROUPS = "optimizer.groups"
# What `drumline plan` writes of a model for which there is no key: kept for whoever reads it, and judged later.
_PLANNED = ("num_dense_layers", "alibi")
_PLANNED_PARTS = ("experts_", "latent_")
_DROPOUT = 0.1  # what a plan's `true` means
_WHOLE = range(-(2**63), 2**63)
_HEAD = ("format", "version")


@dataclass
class Source:
    """Raw tables as they were given, and where each value of them was."""

    tables: dict[str, Any] = field(default_factory=dict)
    place: Callable[[Path], str] = lambda _: ""
    flags: dict[Path, str] = field(default_factory=dict)

    def where(self, path: Path) -> str:
        """Return where a value was given: a flag, or file and line; of one that was not given, its table's."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.flags:
                return self.flags[path[:end]]
        return self.place(path)

    def has(self, path: str) -> bool:
        """Whether a key was given at all."""
        table, _, name = path.partition(".")
        found = self.tables.get(table)
        return isinstance(found, Mapping) and name in found


class Wrong(Exception):
    """A value that cannot be taken; the text is what was expected."""


@dataclass
class Reading:
    """Settings as far as they could be read, and what is wrong with the rest."""

    source: Source
    problems: list[Problem] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)  # keys whose values could not be taken

    def settings(self) -> TrainSettings:
        """Return the settings; a value that is wrong is a problem, and its default stands in for it."""
        found: dict[str, Any] = {}
        for name, table in self.source.tables.items():
            if name in _HEAD:
                continue
            if name not in TABLES:
                self._unknown_table(name, table)
            elif not isinstance(table, Mapping):
                self.add((name,), name, f"is {shown(table)}", f"a table: [{name}]")
            else:
                found[name] = dict(self._values(name, table, (name,)))
        whole = TrainSettings()
        return replace(whole, **{name: replace(getattr(whole, name), **table) for name, table in found.items()})

    def add(self, path: Path, key: str, error: str, expected: str = "", fix: str = "") -> None:
        """Note a problem."""
        self.problems.append(Problem(self.source.where(path), key, error, expected, fix))
        self.bad.add(key)

    def _unknown_table(self, name: str, value: Any) -> None:
        homes = [table for table in TABLES if name in keys()[table]]
        if homes and not isinstance(value, Mapping):
            self.add((name,), name, "stands outside of any table", fix=f"it belongs to [{'] or ['.join(homes)}]")
        else:
            path = next((one for one in self.source.flags if one[0] == name), (name,))
            self.add(path, name, "unknown table", fix=nearest(name[:60], TABLES))

    def _values(self, table: str, given: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
        known = keys()[table]
        others: dict[str, Any] = {}
        for name, value in given.items():
            if name in known:
                key = known[name]
                if key.path == GROUPS:
                    yield name, self._groups(value, (*path, name))
                    continue
                try:
                    taken = checked(key, _adapted(key, value))
                except Wrong as wrong:
                    self.add((*path, name), f"{table}.{name}", f"is {shown(value)}", str(wrong), _near(key, value))
                else:
                    others |= taken if key.path == "model.others" else {}
                    yield name, taken
            elif table == "model" and (name in _PLANNED or name.startswith(_PLANNED_PARTS)):
                others[name] = value
            else:
                self._unknown_key(table, name, (*path, name))
        if others:
            yield "others", others

    def _unknown_key(self, table: str, name: str, path: Path) -> None:
        homes = [f"{one}.{name}" for one in keys() if name in keys()[one] and one != table]
        fix = f"did you mean {' or '.join(homes)}?" if homes else nearest(name[:60], keys()[table])
        self.add(path, f"{table}.{name}", "unknown key", fix=fix)
        # What was probably meant is not known, so nothing is to be said of its default.
        self.bad.update(f"{table}.{one}" for one in keys()[table] if fix == f"did you mean {one}?")

    def _groups(self, value: Any, path: Path) -> tuple[OptimizerGroup, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
            self.add(path, GROUPS, f"is {shown(value)}", f"tables, each under [[{GROUPS}]]")
            return ()
        return tuple(
            OptimizerGroup(**dict(self._values(GROUPS, one, (*path, index)))) for index, one in enumerate(value)
        )


def _adapted(key: Key, value: Any) -> Any:
    """Return a value as a plan means it."""
    if key.path == "model.dropout" and isinstance(value, bool):
        return _DROPOUT if value else 0.0
    if key.path == "model.others" and isinstance(value, list | tuple):
        return {"others": list(value)}
    return value


def _near(key: Key, value: Any) -> str:
    if not key.rule.choices or not isinstance(value, str):
        return ""
    found = nearest(value[:60], [one for one in key.rule.choices if one])
    return found if found.startswith("did you mean") else ""


def checked(key: Key, value: Any) -> Any:
    """Return a value in the kind of its key, or raise Wrong.

    >>> checked(keys()["data"]["files"], ["a.txt"])
    ('a.txt',)
    >>> checked(keys()["batch"]["sequence"], 0.5)
    Traceback (most recent call last):
    drumline.train.config.tables.Wrong: a whole number of 1 or more
    """
    if value is None and key.is_optional:
        return None
    try:
        found = _taken(key.inner, value)
        if key.rule.holds(found):
            return found
    except Wrong:
        pass
    raise Wrong(key.expected)


def _taken(kind: Any, value: Any) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise Wrong
        return tuple(_taken(get_args(kind)[0], one) for one in value)
    if get_origin(kind) is dict:
        if not isinstance(value, Mapping) or not is_plain(value):
            raise Wrong
        return _as_read(value)
    if get_origin(kind) in (Union, UnionType):
        return next(_each_taken(get_args(kind), value))
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind is int and type(value) is int and value in _WHOLE:
        return value
    if (kind is bool and type(value) is bool) or (kind is str and type(value) is str and _is_text(value)):
        return value
    raise Wrong


def _each_taken(kinds: Sequence[Any], value: Any) -> Iterator[Any]:
    """Yield a value in each of some kinds that it is of; raise where it is of none."""
    for kind in kinds:
        with suppress(Wrong):
            yield _taken(kind, value)
    raise Wrong


def _is_text(value: str) -> bool:
    """Whether a text can be written to a file: halves of characters cannot."""
    return not any("\ud800" <= one <= "\udfff" for one in value)


def _as_read(value: Any) -> Any:
    """Return a plain value as reading it from a file would."""
    if isinstance(value, Mapping):
        return {name: _as_read(one) for name, one in value.items()}
    return [_as_read(one) for one in value] if isinstance(value, list | tuple) else value


def is_plain(value: Any) -> bool:
    """Whether a value can be written to a config and read again.

    >>> is_plain({"betas": [0.9, 0.95]}), is_plain({"when": object()})
    (True, False)
    """
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and is_plain(name) and is_plain(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(one) for one in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return _is_text(value)
    return isinstance(value, bool) or (isinstance(value, int) and value in _WHOLE)
