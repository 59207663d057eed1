"""Write plain TOML: tables of strings, numbers, booleans, and lists and tables of them. Python reads it by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def written(values: Mapping[str, Any], *, comment: str = "") -> str:
    """Return values as TOML, with mappings as tables after the rest; `comment` comes first.

    >>> print(written({"version": 1, "mesh": {"tensor": 8, "order": ["tensor", "data"]}}, comment="A plan."))
    # A plan.
    version = 1
    <BLANKLINE>
    [mesh]
    tensor = 8
    order = ["tensor", "data"]
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [f"{key} = {_value(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for name, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines).lstrip("\n")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    # A JSON string is a TOML string, except for characters that JSON may leave unescaped.
    return json.dumps(value) if isinstance(value, str) else repr(value)
