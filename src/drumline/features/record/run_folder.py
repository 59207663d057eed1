"""Write a run to a folder, whose files stay open as long as the pipeline lives.

Lines are buffered, so that a step does not wait for the disk. They are written as whole lines: after a second, when the
pipeline is closed or fails, and when the process ends. A killed process loses at most that second. On a full disk lines
wait until there is room: see core/measured/outbox.py. Buffered lines belong to the process that created them: forked
processes, such as a loader's workers, never write them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from drumline.core.errors import UsageError
from drumline.core.measured.outbox import ADDING, Outbox
from drumline.core.measured.record import COLUMNS, Record
from drumline.core.measured.run import (
    CONFIG,
    DECISIONS,
    ENDED,
    ENVIRONMENT,
    FORMAT,
    METRICS,
    OPENING,
    PLAN,
    PROGRAM,
    program_file,
    rank_file,
)
from drumline.core.program import Program
from drumline.core.version import __version__
from drumline.engine.program.frozen import weight_counts
from drumline.engine.stages.balance import Balance
from drumline.model.block import Block
from drumline.model.blocks.cut import guessed_costs
from drumline.runtime.clocks import device_name

_SECONDS_TO_FLUSH = 1.0
_NEW = ADDING | os.O_CREAT | os.O_EXCL
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def problem(path: Path, ranks: Sequence[int]) -> str:
    """Return why these ranks cannot begin a run in a folder, or an empty text.

    >>> problem(Path("no-such-folder"), [0, 1])
    ''
    """
    if os.path.exists(path) and not os.path.isdir(path):
        return f"{path} is a file, not a folder"
    mine = [rank_file(rank) for rank in ranks] + ([CONFIG, METRICS] if 0 in ranks else [])
    there = [name for name in mine if os.path.exists(path / name)]
    return f"{path} already holds a run: it contains {there[0]}" if there else ""


class RunFolder:
    """The files of this process's ranks; rank 0 also writes those for all ranks."""

    def __init__(self, path: Path, run: str, ranks: Sequence[int], *, continues: bool = False) -> None:
        self.path = path
        self.run = run
        self.is_open = True
        self._process = os.getpid()
        self._flushed = time.monotonic()
        self._outbox = Outbox(path, "the record of the steps")
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name in [rank_file(rank) for rank in ranks] + ([METRICS] if 0 in ranks else []):
                self._outbox.open(name, ADDING | os.O_CREAT if continues and name == METRICS else _NEW)
        except OSError as error:
            self._let_go()
            raise UsageError(
                f"cannot write to {path}: {error.strerror}", expected="a folder for the run", fix="choose another one"
            ) from None

    def describe(
        self, program: Program, config: dict[str, Any], plan: dict[str, Any], environment: dict[str, Any]
    ) -> None:
        """Write what all ranks have in common. The config is written last, because it marks a folder as a run."""
        self._outbox.put(PROGRAM, program.format() + "\n")
        for name, table in ((PLAN, plan), (ENVIRONMENT, environment), (CONFIG, config)):
            self._outbox.put(name, json.dumps({"run": self.run, **table}, indent=2) + "\n")

    def add_program(self, number: int, program: Program) -> None:
        """Write a program that some of the steps run by, before the first of them is written."""
        if self.is_open:
            self._outbox.put(program_file(number), program.format() + "\n")

    def add_record(self, record: Record) -> None:
        """Add a rank's line."""
        table = record.to_json()
        self._add(rank_file(record.rank), {"run": self.run, "step": table.pop("step"), **table})

    def add_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the line for all ranks."""
        self._add(METRICS, {"run": self.run, "step": step, **metrics})

    def add_decision(self, step: int, line: Mapping[str, Any]) -> None:
        """Add what was decided before a step, or what came of it."""
        self._add(DECISIONS, {"run": self.run, "step": step, **line})

    def _add(self, name: str, line: dict[str, Any]) -> None:
        self._outbox.add(name, _encode(line).encode() + b"\n")

    def flush_if_due(self) -> None:
        """Write buffered lines if the last write was a second ago."""
        if time.monotonic() - self._flushed >= _SECONDS_TO_FLUSH:
            self.flush()

    def flush(self) -> None:
        """Write all lines. If the disk is full, they wait, and training continues."""
        self._flushed = time.monotonic()
        if self._is_mine:
            self._outbox.flush()

    @property
    def _is_mine(self) -> bool:
        return self.is_open and os.getpid() == self._process

    def rewind(self, number: int) -> None:
        """Remove the lines of steps from a number on."""

        def is_before(line: bytes) -> bool:
            opening = OPENING.match(line)
            return opening is not None and int(opening[2]) < number

        decisions = {DECISIONS} if METRICS in self._outbox.files else set()  # of processes before these, too
        for name in {*self._outbox.files, *decisions}:
            self._outbox.cut(name, is_before)

    def close(self) -> None:
        """Write all lines and close the files; then rank 0 marks the run as ended."""
        if self._is_mine:
            if METRICS in self._outbox.files and self.path.is_dir():
                self._outbox.flush()
                self._outbox.put(ENDED, json.dumps({"run": self.run}) + "\n")
            self._outbox.close()
        self._let_go()

    def _let_go(self) -> None:
        self.is_open = False
        self._outbox.let_go()


_LEFT_OUT = frozenset({"self", "model", "example", "example_target", "record"})


def plain(value: Any) -> Any:
    r"""Return a setting as JSON: only the last part of paths, and the names of functions and objects.

    >>> plain({"balance": (2, 2), "loss_fn": plain, "weights": Path("/some/where/weights")})
    {'balance': [2, 2], 'loss_fn': 'plain', 'weights': 'weights'}
    >>> plain([float("inf"), 2**70, "\udcff"])  # values that JSON readers refuse become text
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
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Path | Program):
        return plain(value.name)
    if isinstance(value, torch.device):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def config_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a pipeline, and how to read its records."""
    return {
        "format": FORMAT,
        "drumline": __version__,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {name: plain(value) for name, value in settings.items() if name not in _LEFT_OUT},
        "columns": {table: list(names) for table, names in COLUMNS.items()},
    }


def plan_of(
    program: Program, stages: Sequence[Sequence[Block]], recomputed: Collection[str], balance: Balance | None
) -> dict[str, Any]:
    """Return the decisions: blocks per stage, placement, schedule, checkpointing, and the predicted costs."""
    placement = program.placement
    predicted: dict[str, Any] = {"costs": None, "makespan": None, "blocks": None}
    if balance is not None:
        blocks = [{"name": layer.name, **asdict(layer.times)} for layer in balance.profile.layers]
        predicted = {"costs": balance.costs.to_json(), "makespan": balance.timeline.makespan, "blocks": blocks}
    return {
        "schedule": program.name,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "placement": [list(placement.stages_of(rank)) for rank in range(program.num_ranks)],
        "blocks": [[block.name for block in blocks] for blocks in stages],
        "checkpoint": [[block.name for block in blocks if block.name in recomputed] for blocks in stages],
        "trained_shares": [_trained_share(blocks) for blocks in stages],
        "guessed_costs": guessed_costs([block for blocks in stages for block in blocks]),
        "predicted": predicted,
        "program_sha256": hashlib.sha256(program.format().encode()).hexdigest(),
    }


def _trained_share(blocks: Sequence[Block]) -> float:
    """Return which share of the weights of a stage trains."""
    counts = [weight_counts(block) for block in blocks]
    return sum(trained for trained, _ in counts) / max(sum(weights for _, weights in counts), 1)


def environment_of(device: torch.device) -> dict[str, Any]:
    """Return a rank's versions, machine and device; nothing in it names a person or a place."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
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
