"""Keys of a config on a command line: what their flags say, and the values given there as overrides of the config."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from typing import Any

from drumline.core.errors import UsageError
from drumline.core.files import is_regular
from drumline.core.settings.setting import Setting
from drumline.train.config.functions import is_function
from drumline.train.config.keys import keys

_BUILT_IN = ("gpt", "mlp")


def help_of(key: Setting) -> str:
    """Return what the help says about a flag that sets a key.

    >>> help_of(keys()["run"]["steps"])
    'optimizer steps (default 100)'
    >>> help_of(keys()["run"]["threads"])
    'threads of each rank (default: cores / local ranks)'
    >>> help_of(keys()["precision"]["weights"])
    'precision of the parameters (fp32, bf16, fp16; default fp32)'
    """
    if key.kind is bool:
        return key.short.removeprefix("whether to ")
    if key.default in (None, ""):
        named = f"{', '.join(filter(None, key.rule.choices))}; " if key.rule.choices else ""
        return f"{key.short} ({named}default: {key.empty})" if key.empty else key.short
    choices = f"{', '.join(key.rule.choices)}; " if key.rule.choices else ""
    return f"{key.meaning} ({choices}default {key.default})"


def model_named(name: str) -> dict[str, Any]:
    """Return the keys that a model's name on the command line decides.

    >>> model_named("mlp"), model_named("mine.py:build")
    ({'model.kind': 'mlp'}, {'model.kind': 'function', 'model.function': 'mine.py:build'})
    """
    if name in _BUILT_IN:
        return {"model.kind": name}
    if os.path.isdir(name) or is_regular(name):
        return {"model.kind": "hf", "model.path": name}
    if is_function(name):
        return {"model.kind": "function", "model.function": name}
    raise UsageError(
        f"--model is {name[:80]!r}",
        expected="gpt, mlp, a Hugging Face model's folder or config.json, or package.module:function",
    )


def data_named(names: Sequence[str]) -> dict[str, Any]:
    """Return the keys that data's names on the command line decide.

    >>> data_named(["a.txt", "b.txt"]), data_named(["mine.py:data"])
    ({'data.files': ['a.txt', 'b.txt']}, {'data.kind': 'function', 'data.function': 'mine.py:data'})
    """
    if len(names) == 1 and is_function(names[0]) and not is_regular(names[0]):
        return {"data.kind": "function", "data.function": names[0]}
    return {"data.files": list(names)}


def assigned(text: str) -> tuple[str, Any]:
    """Return key and value of `KEY=VALUE`; the value is TOML, or a string as it stands where the key takes one.

    >>> assigned("run.steps=10"), assigned("pipeline.schedule=zb-v"), assigned("optimizer.settings.betas=[0.9, 0.95]")
    (('run.steps', 10), ('pipeline.schedule', 'zb-v'), ('optimizer.settings.betas', [0.9, 0.95]))
    >>> assigned("model.vocabulary=none")
    ('model.vocabulary', None)
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or "." not in name:
        raise UsageError(f"--set is {text[:80]!r}", expected="KEY=VALUE, like run.steps=10")
    table, _, own_key = name.partition(".")
    key = keys().get(table, {}).get(own_key)
    if key is not None and key.is_optional and value.lower() == "none":
        return name, None
    return name, _read(key, value, text)


def _read(key: Setting | None, value: str, text: str) -> Any:
    """Return the value as TOML, or as a text; raise where it is neither."""
    try:
        read = tomllib.loads(f"value = {value}")
        if list(read) == ["value"]:
            is_wanted = key is None or key.inner is not str or isinstance(read["value"], str)
            return read["value"] if is_wanted else value
    except (ValueError, RecursionError):
        pass
    if key is None or key.takes_text:
        return value
    raise UsageError(f"--set is {text[:80]!r}", expected=f"{key.expected}, as TOML writes it")
