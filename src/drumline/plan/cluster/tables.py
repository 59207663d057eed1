"""Plain objects, as JSON and TOML spell them: what does not belong there is refused by name."""

from __future__ import annotations

from typing import Any

from drumline.core.errors import PlanError, nearest
from drumline.core.parsed import shown

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
