"""Records made by hand, and the folder of a run that holds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from drumline.core.measured.record import Record
from drumline.core.measured.run import FORMAT
from drumline.core.program import Program

PROGRAM = Program.parse("0F0,0B0\n1F0,1B0", name="1f1b")


def two_ranks(step: int = 0, begin_ns: int = 1000) -> tuple[Record, Record]:
    """Return a step: 0F0 takes 100 ns, its message 10, 1F0 and 1B0 100 each, the gradient's message 20, 0B0 100."""
    at = begin_ns
    first = Record(
        0,
        step,
        begin_ns=at,
        end_ns=at + 460,
        starts=[at + 10, at + 350],
        ends=[at + 110, at + 450],
        held=[1, 0],
        waits=[0, at + 125, at + 342],
        messages=[1, 0, 1, 0, 1, at + 322, at + 332, at + 342, at + 342, at + 347, 64],
        sends=[1, 0, 0, 1, at + 111, at + 121, 64],
        overheads=[0, at, at + 8, 2, at + 450, at + 454],
    )
    second = Record(
        1,
        step,
        begin_ns=at + 2,
        end_ns=at + 340,
        starts=[at + 120, at + 221],
        ends=[at + 220, at + 321],
        held=[1, 0],
        waits=[0, at + 4, at + 115],
        messages=[0, 1, 0, 0, 0, at + 111, at + 114, at + 115, at + 115, at + 119, 64],
        sends=[0, 1, 0, 0, at + 322, at + 333, 64],
        overheads=[0, at + 2, at + 4],
    )
    return first, second


def line(record: Record, run: str = "abc") -> str:
    table = record.to_json()
    return json.dumps({"run": run, "step": table.pop("step"), **table}, separators=(",", ":")) + "\n"


def write_run(path: Path, steps: Sequence[int] = (0, 1, 2), run: str = "abc") -> None:
    path.mkdir(exist_ok=True)
    (path / "program.csv").write_text(PROGRAM.format() + "\n")
    (path / "plan.json").write_text(json.dumps({"run": run, "schedule": PROGRAM.name}))
    (path / "environment.json").write_text(json.dumps({"run": run}))
    for rank in range(2):
        lines = [line(two_ranks(step, 1000 * (step + 1))[rank], run) for step in steps]
        (path / f"rank{rank}.jsonl").write_text("".join(lines))
    metrics = [json.dumps({"run": run, "step": step, "pp/bubble": 0.5}, separators=(",", ":")) for step in steps]
    (path / "metrics.jsonl").write_text("".join(metric + "\n" for metric in metrics))
    (path / "config.json").write_text(json.dumps({"run": run, "format": FORMAT}))
