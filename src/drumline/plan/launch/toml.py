"""Write TOML: values in one line each, and tables of them. Python reads it by itself.

tomli_w cannot write this: it knows no comments, breaks lists over lines and makes tables of dicts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")


def document(values: Mapping[str, Any], *, comment: str = "") -> str:
    """Return values as TOML, with mappings as tables after the rest; `comment` comes first.

    >>> print(document({"version": 1, "mesh": {"tensor": 8, "order": ["tensor", "data"]}}, comment="A plan."))
    # A plan.
    version = 1
    <BLANKLINE>
    [mesh]
    tensor = 8
    order = ["tensor", "data"]
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [f"{key} = {written(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for name, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{key} = {written(value)}" for key, value in table.items())]
    return "\n".join(lines).lstrip("\n")


def written(value: Any) -> str:
    """Return a value as TOML spells it, in one line.

    >>> written({"betas": (0.9, 0.95), "amsgrad": False, "a b": "c"})
    '{ betas = [0.9, 0.95], amsgrad = false, "a b" = "c" }'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # as JSON spells it, but for a character that TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, Mapping):
        named = ((name if _BARE.match(name) else written(name), item) for name, item in value.items())
        pairs = ", ".join(f"{name} = {written(item)}" for name, item in named)
        return f"{{ {pairs} }}" if pairs else "{}"
    return repr(value)
