"""Where a run is written: a folder, whose files stay open as long as the pipeline lives.

Lines go through a buffer, so that a step does not wait for the disk. It is written out when a second has passed, when
the pipeline is closed or fails, and when the process ends; who kills the process loses no more than that second.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from drumline.core.program import Program
from drumline.core.record import Record
from drumline.core.run import CONFIG, ENDED, ENVIRONMENT, METRICS, PLAN, PROGRAM, rank_file

_SECONDS_TO_FLUSH = 1.0
_BUFFER = 1 << 20
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def problem(path: Path, ranks: Sequence[int]) -> str:
    """Return why these ranks cannot begin a run in a folder, or nothing.

    >>> problem(Path("no-such-folder"), [0, 1])
    ''
    """
    if path.exists() and not path.is_dir():
        return f"{path} is no folder"
    mine = [rank_file(rank) for rank in ranks] + ([CONFIG, METRICS] if 0 in ranks else [])
    there = [name for name in mine if (path / name).exists()]
    return f"{path} holds a run already: {there[0]} is there" if there else ""


class RunFolder:
    """The files that the ranks of this process write; rank 0 writes those that all have in common."""

    def __init__(self, path: Path, run: str, ranks: Sequence[int]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.run = run
        names = {rank: rank_file(rank) for rank in ranks}
        self._ranks = {rank: (path / name).open("xb", buffering=_BUFFER) for rank, name in names.items()}
        self._metrics = (path / METRICS).open("xb", buffering=_BUFFER) if 0 in ranks else None
        self._flushed = time.monotonic()
        self.is_open = True

    def describe(
        self, program: Program, config: dict[str, Any], plan: dict[str, Any], environment: dict[str, Any]
    ) -> None:
        """Write what all ranks have in common; the config comes last, because a folder with one holds a run."""
        _put(self.path / PROGRAM, program.format() + "\n")
        for name, table in ((PLAN, plan), (ENVIRONMENT, environment), (CONFIG, config)):
            _put(self.path / name, json.dumps({"run": self.run, **table}, indent=2) + "\n")

    def add_record(self, record: Record) -> None:
        """Add a rank's line."""
        table = record.to_json()
        self._add(self._ranks[record.rank], {"run": self.run, "step": table.pop("step"), **table})

    def add_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the line of all ranks together."""
        assert self._metrics is not None
        self._add(self._metrics, {"run": self.run, "step": step, **metrics})

    def _add(self, file: BinaryIO, line: dict[str, Any]) -> None:
        file.write(_encode(line).encode() + b"\n")

    def flush_if_due(self) -> None:
        """Write lines out if the last ones are a second old."""
        now = time.monotonic()
        if now - self._flushed >= _SECONDS_TO_FLUSH:
            self._flushed = now
            self.flush()

    def flush(self) -> None:
        """Write all lines out."""
        for file in (*self._ranks.values(), self._metrics):
            if file is not None:
                file.flush()

    def close(self) -> None:
        """Write all lines out and close the files; rank 0 then says that the run has ended."""
        self.is_open = False
        for file in (*self._ranks.values(), self._metrics):
            if file is not None:
                file.close()
        if self._metrics is not None and self.path.is_dir():
            _put(self.path / ENDED, json.dumps({"run": self.run}) + "\n")


def _put(path: Path, text: str) -> None:
    """Write a file at once: who reads finds all of it or none."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
