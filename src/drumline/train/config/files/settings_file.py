"""Settings from a TOML file, a function or nothing, with flags over them: all of it checked before anything starts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path as FilePath
from typing import Any

from drumline.core.errors import ConfigError, DrumlineError
from drumline.core.files import MIB, FileKind, read_text
from drumline.core.parsed import shown
from drumline.plan.device.plan import Plan
from drumline.plan.launch.launch import FORMAT, VERSION
from drumline.train.config import mesh_relations as _meshes  # noqa: F401 - registers its relations
from drumline.train.config import optimizers as _optimizers  # noqa: F401 - registers its relation
from drumline.train.config.files import adapter_relations as _adapters  # noqa: F401 - registers its relations
from drumline.train.config.files import relations as _files  # noqa: F401 - registers its relations
from drumline.train.config.files.data_files import hold_chats
from drumline.train.config.functions import function_named, is_function
from drumline.train.config.problems import Problem, refused
from drumline.train.config.relations import PlacedSettings, related
from drumline.train.config.settings import TrainSettings
from drumline.train.config.tables import Reading, TableSource
from drumline.train.config.together import clashing
from drumline.train.config.toml_lines import Path, line_finder, path_of

KIND = FileKind(
    "config", ConfigError, "a TOML file of training settings, as `drumline train --print-config` writes", MIB
)
MICROBATCHES = "num_microbatches"  # an override that is no key: it decides batch.microbatch
_PLACE = re.compile(r" \(at (line (\d+), column (\d+)|end of document)\)$")


def read_settings(
    source: str | FilePath | Callable[[], Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    flags: Mapping[str, str] | None = None,
) -> TrainSettings:
    """Return the settings of a TOML file, of a function or of neither; ConfigError tells all that is wrong.

    `overrides` are values by key, like {"run.steps": 10}; `flags` says of some by which flag they came.
    "num_microbatches" may stand among them: it cuts batch.sequences into so many microbatches.

    >>> read_settings(None, {"run.steps": 10, "mesh.pipeline": 4}).num_ranks
    4
    >>> read_settings(None, {"batch.sequnce": 10})
    Traceback (most recent call last):
    drumline.core.errors.ConfigError: batch.sequnce: unknown key; did you mean sequence?
    """
    return read_judged(source, overrides, flags=flags).settings


def read_judged(
    source: str | FilePath | Callable[[], Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    flags: Mapping[str, str] | None = None,
) -> PlacedSettings:
    """Return the settings with where each of them was given, and the plan that pipeline.plan names."""
    table_source = _source(source)
    reading = Reading(table_source)
    over = dict(overrides or {})
    microbatches = over.pop(MICROBATCHES, None)
    for key, value in over.items():
        _put(reading, key, value, (flags or {}).get(key, key))
    _check_head(reading)
    settings = reading.settings()
    plan, settings = _planned(reading, settings)
    settings = _followed(settings, table_source)
    if microbatches is not None:
        settings = _cut(reading, settings, microbatches, (flags or {}).get(MICROBATCHES, MICROBATCHES))
    judged = PlacedSettings(settings, table_source, plan)
    reading.problems += related(judged, reading.bad)
    reading.problems += clashing(judged, reading.bad)
    if reading.problems:
        raise refused(reading.problems)
    return judged


def _source(source: str | FilePath | Callable[[], Any] | None) -> TableSource:
    if source is None:
        return TableSource()
    if callable(source):
        return _from_function(source, getattr(source, "__name__", "the function"))
    name = str(source)
    if is_function(name) and not name.endswith(".toml"):
        return _from_function(function_named(name), name)
    text = read_text(source, KIND)
    return from_toml(text, name)


def from_toml(text: str, name: str) -> TableSource:
    """Return what a TOML text spells, with the line of every key."""
    if text.lstrip()[:1] == "{":
        raise ConfigError(
            f"{name} is JSON", expected=KIND.expected,
            fix=f'if it is a plan of a profile, set [pipeline] plan = "{name}" or pass --set pipeline.plan={name}',
        )  # fmt: skip
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _PLACE.search(str(error))
        where = f", {match.group(1)}" if match else ""
        what = _PLACE.sub("", str(error))
        raise refused([Problem(f"{name}{where}", "", f"not TOML: {what[:1].lower()}{what[1:]}")]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not TOML as it is read here: {error}", expected=KIND.expected) from None
    line_of = line_finder(text)

    def place(path: Path) -> str:
        line = next(filter(None, (line_of(path[:end]) for end in range(len(path), 0, -1))), None)
        return name if line is None else f"{name}, line {line}"

    return TableSource(tables, place)


def _from_function(function: Callable[[], Any], name: str) -> TableSource:
    """Return what a function returns: all settings, or some tables by name."""
    try:
        settings = function()
    except DrumlineError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} failed with {type(error).__name__}: {error}", expected="a function without arguments"
        ) from error
    if isinstance(settings, TrainSettings):
        settings = {field.name: getattr(settings, field.name) for field in fields(settings)}
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{name} returns {shown(settings)}",
            expected='TrainSettings, or a dict of its parts, like {"run": RunSettings(steps=10)}',
        )
    return TableSource({str(table): _plain(value) for table, value in settings.items()}, lambda _: name)


def _plain(value: Any) -> Any:
    """Return what a dataclass was given beyond its defaults; other values as they are."""
    if is_dataclass(value) and not isinstance(value, type):
        default = type(value)()
        named = [(field.name, getattr(value, field.name), getattr(default, field.name)) for field in fields(value)]
        # A 1 is not what True is, although they are equal.
        return {name: _plain(item) for name, item, usual in named if item != usual or type(item) is not type(usual)}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _put(reading: Reading, key: str, value: Any, flag: str) -> None:
    """Lay a value over what was read."""
    path = path_of(key)
    reading.source.flags[path] = flag
    home: Any = reading.source.tables
    for part, after in pairwise(path):
        if isinstance(home, dict) and isinstance(part, str):
            home = home.setdefault(part, [] if isinstance(after, int) else {})
        else:
            home = home[part] if _is_item(home, part) else None
    if (isinstance(home, dict) and isinstance(path[-1], str)) or _is_item(home, path[-1]):
        home[path[-1]] = value
    else:
        reading.add(path, key, "is no key that a value can be given to", "table.key, like run.steps")


def _is_item(home: Any, part: str | int) -> bool:
    return isinstance(home, list) and isinstance(part, int) and part < len(home)


def _check_head(reading: Reading) -> None:
    tables = reading.source.tables
    form, version = tables.get("format", FORMAT), tables.get("version", VERSION)
    if form != FORMAT:
        reading.add(("format",), "format", f"is {shown(form)}", f'"{FORMAT}"')
    if version != VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > VERSION
        fix = "a newer Drumline wrote this file: update Drumline" if newer else ""
        reading.add(("version",), "version", f"is {shown(version)}", f"{VERSION}", fix)


def _planned(reading: Reading, settings: TrainSettings) -> tuple[Plan | None, TrainSettings]:
    """Return the plan that is named, and the settings with what it decides where they say nothing."""
    name, source = settings.pipeline.plan, reading.source
    if not name:
        return None, settings
    try:
        plan = Plan.load(name)
    except DrumlineError as error:
        reading.problems.append(Problem.of(source.where(("pipeline", "plan")), "pipeline.plan", error))
        reading.bad.add("pipeline.plan")
        return None, settings
    mesh, batch = settings.mesh, settings.batch
    if not source.has("mesh.pipeline"):
        mesh = replace(mesh, pipeline=plan.num_ranks)
    if not source.has("batch.microbatch"):
        batch = replace(batch, microbatch=plan.microbatch_size)
    if not source.has("batch.sequences"):
        batch = replace(batch, sequences=plan.batch * mesh.data * batch.accumulate)
    return plan, replace(settings, mesh=mesh, batch=batch)


def _followed(settings: TrainSettings, source: TableSource) -> TrainSettings:
    """Return the settings with what follows from others: an MLP learns from points, files of chats hold instructions.

    Chats for an adapter are packed: each row holds several, none of which attends to another.
    What a plan calls selective recomputation leaves out the scores of attention. Torch's attention never keeps them.
    """
    if settings.model.kind == "mlp" and not source.has("data.kind"):
        settings = replace(settings, data=replace(settings.data, kind="points"))
    elif not source.has("data.kind") and hold_chats(settings.data.files):
        settings = replace(settings, data=replace(settings.data, kind="instructions"))
    if settings.adapter.is_on and settings.data.kind == "instructions" and not source.has("lengths.how"):
        settings = replace(settings, lengths=replace(settings.lengths, how="packed"))
    if settings.memory.recompute == "selective":
        settings = replace(settings, memory=replace(settings.memory, recompute="none"))
    return settings


def _cut(reading: Reading, settings: TrainSettings, wanted: Any, flag: str) -> TrainSettings:
    """Return the settings with the batch cut into so many microbatches."""
    batch, unit = settings.batch, settings.mesh.data * settings.batch.accumulate
    reading.source.flags["batch", "microbatch"] = flag
    if type(wanted) is not int or wanted < 1:
        reading.add(("batch", "microbatch"), "batch.microbatch", f"{shown(wanted)} microbatches", "1 or more")
    elif batch.sequences % (wanted * unit):
        count = wanted * unit
        reading.add(
            ("batch", "microbatch"), "batch.sequences", f"is {batch.sequences}, for {wanted} microbatches",
            f"a multiple of {count}", f"use {max(batch.sequences // count, 1) * count}",
        )  # fmt: skip
    else:
        return replace(settings, batch=replace(batch, microbatch=batch.sequences // (wanted * unit)))
    return settings
