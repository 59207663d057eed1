"""Where a run is written: a folder, whose files stay open as long as the pipeline lives.

Lines are gathered, so that a step does not wait for the disk, and written out whole: when a second has passed, when the
pipeline is closed or fails, and when the process ends. Who kills the process loses no more than that second. They
belong to the process that gathered them: one that it forks, a loader's worker say, writes none of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from drumline.core.errors import UsageError
from drumline.core.measured.record import Record
from drumline.core.measured.run import CONFIG, ENDED, ENVIRONMENT, METRICS, PLAN, PROGRAM, rank_file
from drumline.core.program import Program

_SECONDS_TO_FLUSH = 1.0
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def problem(path: Path, ranks: Sequence[int]) -> str:
    """Return why these ranks cannot begin a run in a folder, or nothing.

    >>> problem(Path("no-such-folder"), [0, 1])
    ''
    """
    if os.path.exists(path) and not os.path.isdir(path):
        return f"{path} is no folder"
    mine = [rank_file(rank) for rank in ranks] + ([CONFIG, METRICS] if 0 in ranks else [])
    there = [name for name in mine if os.path.exists(path / name)]
    return f"{path} holds a run already: {there[0]} is there" if there else ""


class RunFolder:
    """The files that the ranks of this process write; rank 0 writes those that all have in common."""

    def __init__(self, path: Path, run: str, ranks: Sequence[int]) -> None:
        self.path = path
        self.run = run
        self.is_open = True
        self._process = os.getpid()
        self._flushed = time.monotonic()
        names = [rank_file(rank) for rank in ranks] + ([METRICS] if 0 in ranks else [])
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._files = {name: FileIO(path / name, "x") for name in names}
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written to: {error.strerror}", expected="a folder for a run", fix="name another one"
            ) from None
        self._lines: dict[str, list[bytes]] = {name: [] for name in names}

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
        self._add(rank_file(record.rank), {"run": self.run, "step": table.pop("step"), **table})

    def add_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the line of all ranks together."""
        self._add(METRICS, {"run": self.run, "step": step, **metrics})

    def _add(self, name: str, line: dict[str, Any]) -> None:
        self._lines[name].append(_encode(line).encode() + b"\n")

    def flush_if_due(self) -> None:
        """Write lines out if the last ones are a second old."""
        if time.monotonic() - self._flushed >= _SECONDS_TO_FLUSH:
            self.flush()

    def flush(self) -> None:
        """Write all lines out. A disk that takes no more ends the recording, and not the training."""
        self._flushed = time.monotonic()
        if not self.is_open or os.getpid() != self._process:
            return
        try:
            for name, lines in self._lines.items():
                _write(self._files[name], b"".join(lines))
                lines.clear()
        except OSError as error:
            self._let_go()
            print(f"drumline: {self.path} is recorded no further: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Write all lines out and close the files; rank 0 then says that the run has ended."""
        self.flush()
        has_ended = self.is_open and os.getpid() == self._process and METRICS in self._files
        self._let_go()
        if has_ended and self.path.is_dir():
            _put(self.path / ENDED, json.dumps({"run": self.run}) + "\n")

    def _let_go(self) -> None:
        self.is_open = False
        for file in self._files.values():
            file.close()


def _write(file: FileIO, data: bytes) -> None:
    """Write all of the data: the kernel may take it in parts."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _put(path: Path, text: str) -> None:
    """Write a file at once: who reads finds all of it or none."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
