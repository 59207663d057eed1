"""Every key of a config, by table and name, as the fields of the settings state it."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import get_type_hints

from drumline.core.settings.setting import Setting, settings_of
from drumline.train.config.settings import OptimizerGroup, TrainSettings

GROUPS = "optimizer.groups"
TABLES: dict[str, str] = {field.name: field.metadata["meaning"] for field in fields(TrainSettings)}


@cache
def keys() -> dict[str, dict[str, Setting]]:
    """Return every key by table and name; those of a group of parameters are under "optimizer.groups".

    >>> list(keys()["mesh"])
    ['tensor', 'pipeline', 'data', 'context', 'expert']
    """
    kinds = get_type_hints(TrainSettings) | {GROUPS: OptimizerGroup}
    return {table: settings_of(kind, table) for table, kind in kinds.items()}
