"""What `drumline calibrate` measured on a device, as values and as a JSON file with one measurement per line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from drumline.core.errors import PlanError
from drumline.core.files import MIB, FileKind, opened
from drumline.core.parsed import Parsed
from drumline.plan.calibrated.setting import StepSetting
from drumline.plan.calibrated.step_tape import Work
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.device.model_profile import Saved


@dataclass(frozen=True, slots=True)
class CalibratedDevice:
    """The device, and the software that measured it. `workspace_bytes` stay allocated after products."""

    name: str
    kind: str
    num_processors: int
    memory_bytes: int
    workspace_bytes: int
    torch: str
    python: str


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """The seconds of a work, half the distance between their quartiles over them, and the bytes it needs meanwhile."""

    work: Work
    seconds: float
    spread: float
    workspace: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """The seconds of something by its size: bytes of a copy or message, a number of layers, tensors or pieces."""

    kind: str
    size: int
    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A real step of the plain model. `busy` is the share of it in which the device computed, by the profiler."""

    shape: Transformer
    setting: StepSetting
    seconds: float
    spread: float
    peak_bytes: int
    busy: float = 1.0


@dataclass(frozen=True, slots=True)
class Calibration(Saved):
    """A device as measured: works, what the host needs, copies and messages, whole steps, and what is missing."""

    device: CalibratedDevice
    date: str
    seconds: float
    works: tuple[MeasuredWork, ...]
    host: tuple[MeasuredSize, ...] = ()
    transfers: tuple[MeasuredSize, ...] = ()
    steps: tuple[MeasuredStep, ...] = ()
    missing: tuple[str, ...] = ()

    KIND = FileKind("calibration", PlanError, "a JSON file that `drumline calibrate --out FILE.json` wrote", 16 * MIB)
    HEAD: ClassVar = {"format": "drumline calibration", "version": 1}
    AGAIN = "calibrate again"

    @property
    def on_host(self) -> bool:
        """Whether the device is the host itself, so that nothing runs ahead of it."""
        return self.device.kind == "cpu"

    def to_json(self) -> str:
        """Return the text of a JSON file, with one measurement per line."""
        table: dict[str, Any] = {
            **self.HEAD, "date": self.date, "seconds": self.seconds, "device": asdict(self.device),
            "missing": list(self.missing), "works": [_work_row(entry) for entry in self.works],
            "host": list(map(asdict, self.host)), "transfers": list(map(asdict, self.transfers)),
            "steps": [_step_row(entry) for entry in self.steps],
        }  # fmt: skip
        lines = []
        for name, value in table.items():
            if isinstance(value, list) and value:
                rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
                lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
            else:
                lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
        return "{\n" + ",\n".join(lines) + "\n}"

    @classmethod
    def _read(cls, table: Parsed) -> Calibration:
        device = table["device"].only(entry.name for entry in fields(CalibratedDevice))
        values: dict[str, Any] = {name: device[name].text() for name in ("name", "kind", "torch", "python")}
        values |= {name: device[name].whole() for name in ("num_processors", "memory_bytes", "workspace_bytes")}
        works = tuple(map(_work_from, table["works"].each()))
        if not works:
            raise PlanError("the calibration has no measured works", expected="one or more", fix="calibrate again")
        return cls(
            CalibratedDevice(**values),
            table["date"].text(),
            table["seconds"].number(),
            works,
            _sizes(table["host"].each()),
            _sizes(table["transfers"].each()),
            tuple(map(_step_from, table["steps"].each())),
            tuple(entry.text() for entry in table["missing"].each()),
        )


def is_calibration(path: str | Path) -> bool:
    """Whether a file claims to be a calibration, of any version, intact or damaged.

    >>> is_calibration("no-such-file.json")
    False
    """
    try:
        with opened(path, Calibration.KIND) as file:
            named_so = rf'"format"\s*:\s*"{Calibration.HEAD["format"]}"'
            return re.search(named_so.encode(), file.read(1000)) is not None
    except PlanError:
        return False


def _work_row(entry: MeasuredWork) -> dict[str, Any]:
    numbers = {"seconds": entry.seconds, "spread": entry.spread, "workspace": entry.workspace}
    return {"kind": entry.work.kind, "dtype": entry.work.dtype, "shape": entry.work.shape, **numbers}


def _work_from(row: Parsed) -> MeasuredWork:
    row.only(("kind", "dtype", "shape", "seconds", "spread", "workspace"))
    shape = tuple(size.whole(1) for size in row["shape"].each(most=8))
    work = Work(row["kind"].text(), row["dtype"].text(), shape)
    return MeasuredWork(work, row["seconds"].number(1e-12), row["spread"].number(), row["workspace"].whole())


def _sizes(rows: Iterable[Parsed]) -> tuple[MeasuredSize, ...]:
    entries = []
    for row in rows:
        row.only(entry.name for entry in fields(MeasuredSize))
        numbers = row["seconds"].number(), row["spread"].number()
        entries.append(MeasuredSize(row["kind"].text(), row["size"].whole(), *numbers))
    return tuple(entries)


_SHAPE = ("num_layers", "hidden", "num_heads", "vocabulary", "sequence", "num_key_value_heads", "feedforward")
_SETTING = ("dtype", "loss", "optimizer", "recompute")


def plain_shape(name: str, **sizes: Any) -> Transformer:
    """Return a model like Llama of these sizes.

    >>> plain_shape("m", num_layers=2, hidden=64, num_heads=4, vocabulary=100, sequence=16).gated
    True
    """
    return Transformer(
        name, **sizes, gated=True, tied=False, learned_positions=False, biased=False, dropout=False
    )  # fmt: skip


def _step_row(entry: MeasuredStep) -> dict[str, Any]:
    sizes = {name: getattr(entry.shape, name) for name in _SHAPE}
    numbers = {"seconds": entry.seconds, "spread": entry.spread, "peak_bytes": entry.peak_bytes, "busy": entry.busy}
    return {**sizes, **asdict(entry.setting), **numbers}


def _step_from(row: Parsed) -> MeasuredStep:
    row.only((*_SHAPE, *_SETTING, "rows", "seconds", "spread", "peak_bytes", "busy"))
    sizes = {name: row[name].whole(1) for name in _SHAPE}
    setting = StepSetting(row["rows"].whole(1), **{name: row[name].text() for name in _SETTING})
    numbers = row["seconds"].number(1e-12), row["spread"].number(), row["peak_bytes"].whole()
    return MeasuredStep(plain_shape("step", **sizes), setting, *numbers, busy=row["busy"].number(0.0, 1.0))
