"""Drumline's own configs of plans, read back strictly: what does not belong there is refused by name."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, fields
from typing import Any

from drumline.core.errors import PlanError, nearest
from drumline.core.parsed import shown
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.practice import Practice
from drumline.plan.launch.launch import FORMAT, VERSION

Kinds = dict[str, type]

_ACCEPTED: dict[type, tuple[type, ...]] = {float: (int, float), list: (list, tuple)}
_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def read_train_config(text: str) -> Layout:
    """Return the layout that a config holds."""
    try:
        read = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the config is not TOML: {error}") from None
    if (read.get("format"), read.get("version")) != (FORMAT, VERSION):
        raise PlanError(
            f"the config has format {shown(read.get('format'))}, version {shown(read.get('version'))}",
            expected=f"{FORMAT!r}, version {VERSION}",
        )
    try:
        table = {
            "batch": read["batch"]["sequences"],
            "microbatch": read["batch"]["microbatch"],
            **read["mesh"],
            "schedule": read["pipeline"]["schedule"],
            "stages_per_rank": read["pipeline"]["stages_per_rank"],
            "counts": read["pipeline"]["layers"],
            "slices": read["pipeline"].get("slices", 1),
            **read["memory"],
        }
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"the config lacks or misspells {error}", expected="the tables that docs/cluster.md lists"
        ) from None
    return layout_of(table)


def layout_of(table: Any) -> Layout:
    """Return the layout that an object spells.

    >>> layout_of({"batch": 8, "tensro": 2})
    Traceback (most recent call last):
    drumline.core.errors.PlanError: unknown key 'tensro' of a layout; did you mean tensor?
    """
    values = _read(Layout, table, "layout", {"practice": dict})
    if "practice" in values:
        values["practice"] = Practice(**_read(Practice, values["practice"], "layout's practice"))
    if "counts" in values:
        for count in values["counts"]:
            if isinstance(count, bool) or not isinstance(count, int):
                raise PlanError(f"counts of the layout hold {shown(count)}", expected="whole numbers")
        values["counts"] = tuple(values["counts"])
    return Layout(**values)


_NAMED: Kinds = {"str": str, "int": int, "float": float, "bool": bool, "tuple[int, ...]": list, "tuple[str, ...]": list}


def _read(of: Any, table: Any, what: str, special: Kinds | None = None) -> dict[str, Any]:
    known = {field.name: (special or {}).get(field.name) or _NAMED[str(field.type)] for field in fields(of)}
    values = checked(table, known, what)
    required(values, {field.name: known[field.name] for field in fields(of) if field.default is MISSING}, what)
    return values


def checked(table: Any, known: Kinds, what: str) -> dict[str, Any]:
    """Return a copy of an object, having refused keys and kinds of values that do not belong there."""
    if not isinstance(table, dict):
        raise PlanError(f"the {what} is a {type(table).__name__}", expected="an object")
    for key, value in table.items():
        if key not in known:
            raise PlanError(f"unknown key {shown(key)} of a {what}", fix=nearest(str(key)[:60], known))
        kind = known[key]
        if not isinstance(value, _ACCEPTED.get(kind, (kind,))) or (isinstance(value, bool) and kind is not bool):
            raise PlanError(f"{key} of the {what} is {shown(value)}", expected=_WORDS[kind])
    return dict(table)


def required(values: dict[str, Any], known: Kinds, what: str) -> None:
    """Refuse an object that lacks one of these keys."""
    for name, kind in known.items():
        if name not in values:
            raise PlanError(f"{name} of the {what} is missing", expected=_WORDS[kind])
