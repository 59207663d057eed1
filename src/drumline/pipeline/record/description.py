"""What a run writes of itself before its first step: settings, plan and surroundings, as plain values."""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from drumline.core.measured.record import COLUMNS
from drumline.core.measured.run import FORMAT
from drumline.core.program import Program
from drumline.pipeline.assembly import Assembly
from drumline.pipeline.balance import Balance
from drumline.runtime.blocks.cut import guessed_costs
from drumline.runtime.capture.cuda import device_name

_LEFT_OUT = frozenset({"self", "model", "example", "example_target", "record"})


def plain(value: Any) -> Any:
    r"""Return a setting as JSON has it; of paths only the last part, of functions and objects their name.

    >>> plain({"balance": (2, 2), "loss_fn": plain, "weights": Path("/some/where/weights")})
    {'balance': [2, 2], 'loss_fn': 'plain', 'weights': 'weights'}
    >>> plain([float("inf"), 2**70, "\udcff"])  # what JSON's readers refuse is text
    ['inf', '1180591620717411303424', '?']
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if isinstance(value, Path | Program):
        return plain(value.name)
    if isinstance(value, torch.device):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def config_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a pipeline was made with, and how its records are to be read."""
    return {
        "format": FORMAT,
        "drumline": _version(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {name: plain(value) for name, value in settings.items() if name not in _LEFT_OUT},
        "columns": {table: list(names) for table, names in COLUMNS.items()},
    }


def _version() -> str:
    try:
        return version("drumline")
    except PackageNotFoundError:  # run from its source
        return "unknown"


def plan_of(program: Program, assembly: Assembly, balance: Balance | None) -> dict[str, Any]:
    """Return what was decided: blocks per stage, placement, schedule, checkpointing, and what it should cost."""
    placement = program.placement
    predicted: dict[str, Any] = {"costs": None, "makespan": None, "blocks": None}
    if balance is not None:
        blocks = [{"name": one.name, **asdict(one.times)} for one in balance.profile.layers]
        predicted = {"costs": balance.costs.to_json(), "makespan": balance.timeline.makespan, "blocks": blocks}
    return {
        "schedule": program.name,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "placement": [list(placement.stages_of(rank)) for rank in range(program.num_ranks)],
        "blocks": [[block.name for block in blocks] for blocks in assembly.cuts],
        "checkpoint": [[one.name for one in blocks if one.name in assembly.checkpointed] for blocks in assembly.cuts],
        "guessed_costs": guessed_costs([block for blocks in assembly.cuts for block in blocks]),
        "predicted": predicted,
        "program_sha256": hashlib.sha256(program.format().encode()).hexdigest(),
    }


def environment_of(device: torch.device) -> dict[str, Any]:
    """Return what a rank runs on: versions, machine and device, and nothing that names a person or a place."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "device_name": device_name(device) or _processor(),
    }


def _processor() -> str:
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
