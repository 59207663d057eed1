"""From raw tables to settings: unknown keys, wrong kinds and values out of range become problems, all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drumline.core.errors import nearest
from drumline.core.parsed import shown
from drumline.core.settings.kinds import Wrong
from drumline.core.settings.setting import Setting
from drumline.train.config.keys import GROUPS, TABLES, keys
from drumline.train.config.problems import Problem
from drumline.train.config.settings import OptimizerGroup, TrainSettings
from drumline.train.config.toml_lines import Path

# What `drumline plan` writes of a model for which there is no key: kept for whoever reads it, and judged later.
_PLANNED = ("num_dense_layers", "alibi", "norm", "norm_epsilon", "activation")
_PLANNED_PARTS = ("experts_", "latent_")
_DROPOUT = 0.1  # what a plan's `true` means
_HEAD = ("format", "version")


@dataclass
class TableSource:
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
        content = self.tables.get(table)
        return isinstance(content, Mapping) and name in content


@dataclass
class Reading:
    """Settings as far as they could be read, and what is wrong with the rest."""

    source: TableSource
    problems: list[Problem] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)  # keys whose values could not be taken

    def settings(self) -> TrainSettings:
        """Return the settings; a value that is wrong is a problem, and its default stands in for it."""
        settings: dict[str, Any] = {}
        for name, table in self.source.tables.items():
            if name in _HEAD:
                continue
            if name not in TABLES:
                self._unknown_table(name, table)
            elif not isinstance(table, Mapping):
                self.add((name,), name, f"is {shown(table)}", f"a table: [{name}]")
            else:
                settings[name] = dict(self._values(name, table, (name,)))
        whole = TrainSettings()
        return replace(whole, **{name: replace(getattr(whole, name), **table) for name, table in settings.items()})

    def add(self, path: Path, key: str, error: str, expected: str = "", fix: str = "") -> None:
        """Note a problem."""
        self.problems.append(Problem(self.source.where(path), key, error, expected, fix))
        self.bad.add(key)

    def _unknown_table(self, name: str, value: Any) -> None:
        homes = [table for table in TABLES if name in keys()[table]]
        if homes and not isinstance(value, Mapping):
            self.add((name,), name, "is outside of any table", fix=f"it belongs to [{'] or ['.join(homes)}]")
        else:
            path = next((flag for flag in self.source.flags if flag[0] == name), (name,))
            self.add(path, name, "unknown table", fix=nearest(name[:60], TABLES))

    def _values(self, table: str, values: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
        known = keys()[table]
        others: dict[str, Any] = {}
        for name, value in values.items():
            if name in known:
                key = known[name]
                if key.path == GROUPS:
                    yield name, self._groups(value, (*path, name))
                    continue
                try:
                    taken = key.taken(_adapted(key, value))
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
        homes = [f"{key}.{name}" for key in keys() if name in keys()[key] and key != table]
        fix = f"did you mean {' or '.join(homes)}?" if homes else nearest(name[:60], keys()[table])
        self.add(path, f"{table}.{name}", "unknown key", fix=fix)
        # What was probably meant is not known, so nothing is to be said of its default.
        self.bad.update(f"{table}.{key}" for key in keys()[table] if fix == f"did you mean {key}?")

    def _groups(self, value: Any, path: Path) -> tuple[OptimizerGroup, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
            self.add(path, GROUPS, f"is {shown(value)}", f"tables, each under [[{GROUPS}]]")
            return ()
        return tuple(
            OptimizerGroup(**dict(self._values(GROUPS, item, (*path, index)))) for index, item in enumerate(value)
        )


def out_of_bounds(settings: TrainSettings, tables: Iterable[str]) -> Iterator[Problem]:
    """Yield what is wrong with values in some tables of settings that were made by hand, which no reader has seen."""
    filled = [(table, getattr(settings, table)) for table in tables]
    filled += [(GROUPS, group) for group in settings.optimizer.groups if "optimizer" in tables]
    for table, values in filled:
        for name, key in keys()[table].items():
            value = getattr(values, name)
            is_right = key.is_optional if value is None else key.rule.holds(value)
            if not is_right:
                yield Problem("", key.path, f"is {shown(value)}", key.expected, _near(key, value))


def _adapted(key: Setting, value: Any) -> Any:
    """Return a value as a plan means it."""
    if key.path == "model.dropout" and isinstance(value, bool):
        return _DROPOUT if value else 0.0
    if key.path == "model.others" and isinstance(value, list | tuple):
        return {"others": list(value)}
    return value


def _near(key: Setting, value: Any) -> str:
    if not key.rule.choices or not isinstance(value, str):
        return ""
    near = nearest(value[:60], [choice for choice in key.rule.choices if choice])
    return near if near.startswith("did you mean") else ""
