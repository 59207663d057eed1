"""Whether a checkpoint holds the adapter that is trained, before anything is loaded from it.

Tensors of another rank have other shapes. Another alpha fits, and would change what the adapter computes.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from drumline.core.errors import ModelError
from drumline.core.parsed import shown
from drumline.train.config.settings import TrainSettings
from drumline.train.config.write import KEPT
from drumline.train.models.built import Adapter
from drumline.train.tune.peft_config import CONFIG, OWN

# What an adapter is, by PEFT's names; a run that continues may change all else, such as dropout.
_MAKE_UP = (
    "peft_type", "r", "lora_alpha", "alpha", "target_modules", "modules_to_save", "bias", "use_rslora", "use_dora",
    "layers_to_transform", "rank_pattern", "alpha_pattern", "feedforward_modules",
)  # fmt: skip


def check_same(adapter: Adapter | None, checkpoint: Path) -> None:
    """Refuse a checkpoint with another adapter than the one that is trained, or with one where none is.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / CONFIG).write_text('{"peft_type": "LORA", "r": 8}')
    >>> check_same(Adapter({}, b'{"peft_type": "LORA", "r": 4}'), folder)
    Traceback (most recent call last):
    drumline.core.errors.ModelError: adapter.rank is 4, and the adapter in ... has 8; expected the adapter that ...
    """
    saved = _saved(checkpoint)
    if adapter is None and saved is None:
        return
    if adapter is None:
        raise ModelError(
            f"checkpoint.resume: {checkpoint} holds an adapter, without its base",
            expected="the adapter that was saved, to go on with it",
            fix="add --adapter, with the settings of that run",
        )
    if saved is None:
        raise ModelError(
            f"checkpoint.resume: {checkpoint} has no {CONFIG}",
            expected="a checkpoint of a run with an adapter",
            fix="train an adapter beside that model instead: --model with the checkpoint's folder",
        )
    now: dict[str, Any] = json.loads(adapter.config)
    for name in (name for name in _MAKE_UP if name in now and name in saved):
        if now[name] != saved[name]:
            key = "adapter.method" if name == "peft_type" else f"adapter.{OWN.get(name, f'settings.{name}')}"
            raise ModelError(
                f"{key} is {_text(now[name])}, and the adapter in {checkpoint} has {_text(saved[name])}",
                expected="the adapter that was saved, to go on with it",
                fix="change it back, or start another run",
            )


def check_base(settings: TrainSettings, checkpoint: Path) -> None:
    r"""Refuse to go on beside another frozen base than the run of a checkpoint had, if that is known.

    >>> import tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> _ = (run / KEPT).write_text('[adapter]\nmethod = "lora"\nbase = "nf4"')
    >>> from drumline.train.config.adapter_settings import AdapterSettings
    >>> settings = TrainSettings(adapter=AdapterSettings("lora", base="int8"))
    >>> check_base(settings, run / "checkpoints" / "step-1")
    Traceback (most recent call last):
    drumline.core.errors.ModelError: adapter.base is "int8", and the adapter in ... was trained beside "nf4"; ...
    """
    try:
        before = tomllib.loads((checkpoint.parent.parent / KEPT).read_text(encoding="utf-8"))
        base, weights = before["adapter"]["base"], before.get("precision", {}).get("weights", "fp32")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    adapter = settings.adapter
    now, then = adapter.base or settings.precision.weights, base or weights
    if adapter.is_on and now != then:
        raise ModelError(
            f'adapter.base is "{adapter.base}", and the adapter in {checkpoint} was trained beside "{base}"',
            expected="the base of that run, to go on with it",
            fix=f"change it back, or start a run that begins with this adapter: adapter.start = {str(checkpoint)!r}",
        )


def _saved(checkpoint: Path) -> dict[str, Any] | None:
    """Return the configuration of the adapter in a checkpoint; None if it has none that can be read."""
    try:
        table = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return table if isinstance(table, dict) else None


def _text(value: Any) -> str:
    return "not set" if value is None else shown(value.lower() if isinstance(value, str) else value)
