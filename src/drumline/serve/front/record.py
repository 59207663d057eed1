"""The timeline of a served load, as the folder of a run that `drumline report` reads.

Every `window` microbatches, in the order in which they entered, are a step of the inference program. Stage s is rank s,
and its row is F of each microbatch. What stages measured becomes starts and ends, and the messages between them. Stages
of one machine share a clock; on several hosts times would need their clocks, so that is refused.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from drumline.core.action import Op
from drumline.core.errors import UsageError
from drumline.core.measured.metrics import step_metrics
from drumline.core.measured.record import COLUMNS, OVERHEADS, RECEIVES, Record
from drumline.core.measured.run import CONFIG, ENDED, ENVIRONMENT, FORMAT, METRICS, PLAN, PROGRAM, rank_file
from drumline.schedules import schedules
from drumline.schedules.forward_only import forward_only
from drumline.serve.wire.manifest import Manifest
from drumline.serve.wire.stage_times import StageTimes

_WINDOW = 32
_FORWARD, _ASK = RECEIVES.index(Op.RECV_F), OVERHEADS.index("ask")
_INFERENCE = next(schedule for schedule in schedules().values() if schedule.recipe is forward_only)


def check_record(folder: Path, served: Path) -> None:
    """Refuse a folder whose files would mix with others: that of the exported model, one inside it, and any not empty.

    >>> check_record(Path("served/run"), Path("served"))
    Traceback (most recent call last):
    drumline.core.errors.UsageError: --record is served/run, inside the exported model; choose a folder outside served
    """
    if served.resolve() in folder.resolve().parents:
        raise UsageError(f"--record is {folder}, inside the exported model", fix=f"choose a folder outside {served}")
    if folder.resolve() == served.resolve():
        raise UsageError(f"--record is {folder}, the exported model itself", fix="choose another folder for --record")
    if (folder / CONFIG).exists():
        raise UsageError(f"{folder} already holds a run", fix="choose another folder for --record")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", expected="a new folder", fix="choose another folder for --record")


class LoadRecord:
    """Writes what stages measured to a run's folder, a step at a time.

    If the disk takes no more, `stopped` hears why, nothing more is written, and the service continues.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        window: int = _WINDOW,
        stopped: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        self.folder, self._window, self._stopped = folder, window, stopped
        self._is_open = True
        self._stages = len(manifest.stages)
        self._run = uuid.uuid4().hex[:12]
        self._program = _INFERENCE.build(self._stages, window, 1)
        self._waiting: list[tuple[list[StageTimes], int]] = []
        self._step = 0
        self._since = [0] * self._stages
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = [*(rank_file(rank) for rank in range(self._stages)), METRICS]
            self._files: dict[str, TextIO] = {name: (folder / name).open("x", encoding="utf-8") for name in names}
            (folder / PROGRAM).write_text(self._program.format() + "\n", encoding="utf-8")
            plan = {
                "schedule": self._program.name,
                "num_ranks": self._stages,
                "num_stages": self._stages,
                "num_microbatches": window,
                "blocks": [list(stage.blocks) for stage in manifest.stages],
            }
            config = {
                "format": FORMAT,
                "began": datetime.now(UTC).isoformat(timespec="seconds"),
                "settings": {"served": manifest.model},
                "columns": {table: list(names) for table, names in COLUMNS.items()},
            }
            for name, table in ((PLAN, plan), (ENVIRONMENT, {"ranks": []}), (CONFIG, config)):
                self._put(name, table)
        except OSError as error:
            raise UsageError(f"cannot write to {folder}: {error.strerror}", fix="choose another --record") from None

    def _put(self, name: str, table: dict[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps({"run": self._run, **table}, indent=2) + "\n", encoding="utf-8")

    def add(self, times: Sequence[StageTimes], rows: int) -> None:
        """Take in a microbatch that every stage has computed."""
        if not self._is_open:
            return
        self._waiting.append((list(times), rows))
        # Answers come in another order than starts, by no more than what fits into the pipe.
        if len(self._waiting) >= self._window + 4 * self._stages:
            self._waiting.sort(key=lambda pair: pair[0][0].start)
            taken, self._waiting = self._waiting[: self._window], self._waiting[self._window :]
            try:
                self._write([row for row, _ in taken], sum(rows for _, rows in taken))
            except OSError as error:
                self._is_open = False
                self._stopped(error)

    def _write(self, taken: list[list[StageTimes]], rows: int) -> None:
        """Write a step; one whose microbatches overtook each other fits no program and is left out."""
        columns = [[row[stage] for row in taken] for stage in range(self._stages)]
        if any(a.end > b.start for column in columns for a, b in pairwise(column)):
            return
        records = [self._record(rank, column, taken) for rank, column in enumerate(columns)]
        seconds = (max(entry.end_ns for entry in records) - min(entry.begin_ns for entry in records)) * 1e-9
        metrics = {"throughput(rows/s)": rows / seconds if seconds else 0.0, **step_metrics(self._program, records)}
        for record in records:
            table = record.to_json()
            self._line(rank_file(record.rank), {"step": table.pop("step"), **table})
            self._since[record.rank] = record.end_ns
        self._line(METRICS, {"step": self._step, **metrics})
        self._step += 1

    def _record(self, rank: int, column: list[StageTimes], taken: list[list[StageTimes]]) -> Record:
        messages: list[int] = []
        waits: list[int] = []
        idle: list[int] = []
        begin = taken[0][0].arrived if rank == 0 else min(column[0].arrived, taken[0][0].start)
        begin = max(begin, self._since[rank])
        free = begin
        for at, times in enumerate(column):
            if rank:
                before = taken[at][rank - 1]
                arrived = max(times.arrived, before.sent)
                row = (at, rank, _FORWARD, at, rank - 1, before.end, before.sent, arrived, times.start, times.start)
                messages += [*row, times.bytes_in]
                if times.start > free:
                    waits += [at, free, times.start]
            elif times.start > free:
                idle += [_ASK, free, times.start]
            free = times.end
        return Record(
            rank,
            self._step,
            since_ns=self._since[rank] or begin,
            begin_ns=begin,
            end_ns=max(column[-1].end, begin),
            starts=[times.start for times in column],
            ends=[times.end for times in column],
            held=[0] * len(column),
            messages=messages,
            waits=waits,
            overheads=idle,
        )

    def _line(self, name: str, table: dict[str, Any]) -> None:
        line = json.dumps({"run": self._run, **table}, separators=(",", ":"))
        self._files[name].write(line + "\n")
        self._files[name].flush()

    def close(self) -> None:
        """Close the files and mark the run as ended; what fills no step is left out."""
        for file in self._files.values():
            with suppress(OSError):  # what the disk did not take is lost, and told already
                file.close()
        with suppress(OSError):
            self._put(ENDED, {})
