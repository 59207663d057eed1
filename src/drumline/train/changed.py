"""What differs between a run in a folder and the settings that are to continue it.

The model and the kind of optimizer decide what a checkpoint holds: others are refused before ranks start. All else may
change, and is told. Models of functions and folders are compared by the checkpoint itself, when it is loaded.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drumline.core.errors import ConfigError, UsageError
from drumline.core.parsed import shown
from drumline.train.config.settings import TrainSettings
from drumline.train.config.write import KEPT, config_text

_OWN = {"run.out", "checkpoint.resume", "checkpoint.continues", "model.name"}  # say nothing of the training
_BUILT_IN = ("gpt", "mlp")
_MOST_SHOWN = 6


def check_changes(settings: TrainSettings, folder: Path, *, has_state: bool) -> None:
    """Refuse settings that cannot continue the run in a folder, and tell of others that differ from it."""
    changes = list(_changes(folder, settings))
    for key, was, now in changes if has_state else ():
        if key in ("model.kind", "optimizer.kind") or (key.startswith("model.") and settings.model.kind in _BUILT_IN):
            raise UsageError(
                f"{key} is {now}, and the run in {folder} has {was}",
                expected="the model and the optimizer of the run, to continue it",
                fix=f"change it back, or start another run: --out FOLDER (the run's settings are in {folder / KEPT})",
            )
    if changes:
        texts = [f"{key} {was} is now {now}" for key, was, now in changes[:_MOST_SHOWN]]
        more = [f"{len(changes) - _MOST_SHOWN} more"] if len(changes) > _MOST_SHOWN else []
        logging.getLogger("drumline").warning("the run in %s continues changed: %s", folder, ", ".join(texts + more))


def _changes(folder: Path, settings: TrainSettings) -> Iterator[tuple[str, str, str]]:
    """Yield the keys that differ, with the run's value and the one that is asked for."""
    try:
        before = tomllib.loads((folder / KEPT).read_text(encoding="utf-8"))
        now = tomllib.loads(config_text(settings))
    except (OSError, ValueError, ConfigError):
        return  # nothing is known of the run, or these settings are of a function
    for table in now:
        ours, theirs = now[table], before.get(table, {})
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for name in sorted({*ours, *theirs}):
                key, values = f"{table}.{name}", (theirs.get(name), ours.get(name))
                if values[0] != values[1] and key not in _OWN:
                    yield key, _text(values[0]), _text(values[1])


def _text(value: Any) -> str:
    return "not set" if value is None else shown(value)
