"""What a pipeline is made with, looked at before anything starts: every argument of its kind, in its range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.core.errors import ModelError, UsageError
from drumline.core.program import Program
from drumline.pipeline.model import splits
from drumline.schedules import DEFAULT

UNUSED = ("warn", "raise", "ignore")
_COUNTS = ("num_microbatches", "num_ranks", "stages_per_rank")
_SWITCHES = ("master_weights", "check_finite", "check_model", "merge_weight_gradients", "capture", "weigh")


def check(given: Mapping[str, Any]) -> None:
    """Refuse arguments of the wrong kind by their names.

    >>> check({"num_ranks": "2"})
    Traceback (most recent call last):
    drumline.core.errors.UsageError: num_ranks is '2'; expected a whole number of 1 or more
    """
    for name in _COUNTS:
        if given.get(name) is not None:
            _count(name, given[name])
    if "ahead" in given:
        _count("ahead", given["ahead"])
    seed = given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed is {seed!r}", expected="a whole number")
    timeout = given.get("timeout", 1.0)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise UsageError(f"timeout is {timeout!r}", expected="seconds above 0")
    for name in _SWITCHES:
        if not isinstance(given.get(name, False), bool):
            raise UsageError(f"{name} is {given[name]!r}", expected="True or False")
    schedule = given.get("schedule", DEFAULT)
    if not isinstance(schedule, str | Path | Program):
        raise UsageError(f"schedule is {schedule!r:.80}", expected="a name, a Program, or a CSV file")
    record = given.get("record", True)
    if not isinstance(record, bool | str | Path) or record == "":
        raise UsageError(f"record is {record!r:.80}", expected="True, False, or the folder of a run")
    if schedule == "auto":
        _auto(given.get("record", True))
    splits.check(given.get("split"))
    _unused(given.get("unused", "warn"))
    device_named(given.get("device"))
    if isinstance(getattr(given.get("model"), "_orig_mod", None), nn.Module):
        raise ModelError(
            "the model was compiled by torch.compile",
            expected="the model itself: each stage is compiled by itself",
            fix="pass what was compiled, and compile=True",
        )


def _unused(mode: Any) -> None:
    if mode not in UNUSED:
        raise UsageError(f"unused is {mode!r}", expected='"warn", "raise" or "ignore"')


def _auto(record: Any) -> None:
    """Refuse to search where nothing is measured, or where a run would have two programs."""
    if record is False:
        raise UsageError("record is False and schedule is 'auto'", expected="steps that are measured")
    if record is not True:
        raise UsageError(
            f"record is {str(record)!r} and schedule is 'auto'",
            expected="one program in all of a run",
            fix="save the program that is found, pipe.program.save(FILE.csv), and record a run with schedule=FILE.csv",
        )


def device_named(device: Any) -> torch.device | None:
    """Return the device that a user names, if it is there; None for none.

    >>> device_named("gpu")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: device is 'gpu'; expected a device of PyTorch's, such as cpu or cuda:0
    """
    if device is None:
        return None
    expected = "a device of PyTorch's, such as cpu or cuda:0"
    if not isinstance(device, str | torch.device):
        raise UsageError(f"device is {device!r}", expected=expected)
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device is {device!r}", expected=expected) from None
    there = torch.accelerator.current_accelerator(check_available=True)
    if found.type not in ("cpu", "meta") and (there is None or there.type != found.type):
        here = "cpu" if there is None else f"cpu or {there.type}"
        raise UsageError(f"device is {str(device)!r}, and PyTorch finds none here", expected=here)
    return found


def _count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}", expected="a whole number of 1 or more")
