"""Settings as TOML: every key with its value and meaning, which reads back as the same settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.core.errors import ConfigError
from drumline.core.parsed import shown
from drumline.core.settings.kinds import is_plain
from drumline.core.settings.setting import Setting
from drumline.plan.launch.launch import FORMAT, VERSION
from drumline.plan.launch.toml import written
from drumline.train.config.keys import GROUPS, TABLES, keys
from drumline.train.config.settings import OptimizerGroup, TrainSettings

_WIDTH = 40  # where comments begin, if the value is shorter
KEPT = "settings.toml"


def config_text(settings: TrainSettings, *, left_out: Collection[str] = ()) -> str:
    """Return all settings as a config file, each key with its meaning behind it; those left out are comments.

    >>> print(config_text(TrainSettings()).partition("[data]")[0].splitlines()[6])
    name = ""                               # a name for the model, used for the run's folder
    """
    lines = [
        "# Settings for `drumline train`. Every key may be left out: these are the values that then hold.",
        f'format = "{FORMAT}"',
        f"version = {VERSION}",
    ]
    for table, meaning in TABLES.items():
        lines += ["", f"[{table}]  # {meaning}"]
        values = getattr(settings, table)
        for name, key in keys()[table].items():
            if key.path != GROUPS:
                lines.append(("# " if key.path in left_out else "") + _line(key, getattr(values, name)))
        if table == "optimizer":
            lines += _groups(settings.optimizer.groups)
    return "\n".join(lines) + "\n"


def keep_settings(settings: TrainSettings, folder: Path) -> None:
    """Write the settings into a run's folder, for `drumline export`; those that no file can hold are not written."""
    with suppress(ConfigError, OSError):
        (folder / KEPT).write_text(config_text(settings), encoding="utf-8")


def _groups(groups: tuple[OptimizerGroup, ...]) -> Iterator[str]:
    for group in groups:
        yield "\n[[optimizer.groups]]"
        yield from (_line(key, getattr(group, name)) for name, key in keys()[GROUPS].items())
    if not groups:
        yield f"# [[{GROUPS}]] may follow: {keys()['optimizer']['groups'].meaning}"


def _line(key: Setting, value: Any) -> str:
    if value is None:
        return f"{f'# {key.name} =':<{_WIDTH}}# {key.meaning}"
    if not is_plain(value):
        raise ConfigError(f"{key.path} is {shown(value)}", expected="values that a config file can hold")
    return f"{f'{key.name} = {written(value)}':<{_WIDTH - 1}} # {key.meaning}"
