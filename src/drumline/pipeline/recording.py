"""What becomes of what is measured: nothing, the last step's timeline, or a run in a folder.

    step n ends      every rank writes its line of step n
    step n+1 ends    rank 0 writes the metrics of step n: by now all have told how it went there

Nothing is waited for: what rank 0 has not heard of yet, it writes after a later step.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.core.errors import RunError, UsageError
from drumline.core.metrics import step_metrics
from drumline.core.program import Program
from drumline.core.record import Record
from drumline.pipeline.assembly import Assembly
from drumline.pipeline.balance import Balance
from drumline.pipeline.crew import Crew
from drumline.pipeline.described import config_of, environment_of, plan_of
from drumline.pipeline.run_folder import RunFolder, problem
from drumline.pipeline.tally import Tally

NANO = 1e-9


class Recording:
    """The records of this process's ranks; `record` is what the user asked for: True, False, or a folder."""

    def __init__(self, record: bool | str | Path, crew: Crew) -> None:
        self.is_on = record is not False
        self._crew = crew
        self.folder: RunFolder | None = None
        self._ranks = [channel.rank for channel in crew.channels]
        self._waiting: list[tuple[Tally, dict[str, Any]]] = []  # steps whose metrics are not written
        self._ended: dict[int, int] = {}  # by rank, when its last step did
        if not isinstance(record, bool):
            self.folder = self._opened(Path(record))

    def _opened(self, path: Path) -> RunFolder:
        """Begin a run, on all ranks or on none."""
        own = [(problem(path, [rank]), secrets.token_hex(6)) for rank in self._ranks]
        told = self._crew.all_told("run", own)
        for text, _ in told:
            if text:
                raise UsageError(
                    text,
                    expected="a folder without a run, or none yet",
                    fix="name another folder for this run",
                )
        return RunFolder(path, told[0][1], self._ranks)

    def describe(
        self, settings: Mapping[str, Any], program: Program, assembly: Assembly, balance: Balance | None
    ) -> None:
        """Write what is known before the first step; all ranks call it."""
        if self.folder is not None:
            own = environment_of(assembly.device)
            told = self._crew.all_told("environment", [own] * len(self._crew.channels))
            if 0 in self._ranks:
                plan = plan_of(program, assembly, balance)
                self.folder.describe(program, config_of(settings), plan, {"ranks": told})

    def check(self) -> None:
        """Refuse to say what was not recorded."""
        if not self.is_on:
            raise RunError("nothing was recorded: record=False", fix="make the pipeline with record=True or a folder")

    def add(self, tally: Tally, records: Sequence[Record]) -> None:
        """Take in the records of this process's ranks, once a step is over."""
        if self.folder is None:
            return
        for record in records:
            self.folder.add_record(record)
        if 0 in self._ranks:
            while self._waiting and self._waiting[0][0].is_heard:
                self._write_metrics(*self._waiting.pop(0))
            self._waiting.append((tally, {}))
        self.folder.flush_if_due()

    def note(self, **metrics: Any) -> None:
        """Add metrics to the last step."""
        if self._waiting:
            self._waiting[-1][1].update(metrics)

    def close(self) -> None:
        """Write what is left, as far as it is known."""
        if self.folder is not None and self.folder.close.alive:
            for tally, noted in self._waiting:
                if tally.is_heard:
                    self._write_metrics(tally, noted)
            self._waiting.clear()
            self.folder.close()

    def _write_metrics(self, tally: Tally, noted: Mapping[str, Any]) -> None:
        assert self.folder is not None
        record = tally.records[0]
        found: dict[str, Any] = {"loss_metrics/global_avg_loss": tally.loss, **noted}
        if record is not None:
            since = self._ended.get(0, record.begin_ns)
            seconds = (record.end_ns - since) * NANO
            self._ended[0] = record.end_ns
            found["time_metrics/end_to_end(s)"] = seconds
            rows, tokens = (max(getattr(one, what) for one in tally.told) for what in ("num_rows", "num_tokens"))
            if rows:
                found["throughput(rows/s)"] = rows / seconds
            if tokens:
                found["throughput(tps)"] = tokens / seconds / len(tally.told)  # of each device, as torchtitan has it
        if tally.has_timeline:
            found |= step_metrics(tally.timeline)
        self.folder.add_metrics(tally.number, {name: _plain(value) for name, value in found.items()})


def _plain(value: Any) -> Any:
    """Return a number as JSON has it, which knows neither tensors nor what is not finite."""
    number = value.item() if isinstance(value, Tensor) else value
    return None if isinstance(number, float) and not math.isfinite(number) else number
