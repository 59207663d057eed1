"""Folders of runs that a simulation stands in for: what ranks would have written, had they run it in these seconds."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from drumline.core import rules
from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.measured.record import COLUMNS, Record, coded
from drumline.core.measured.run import FORMAT
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from records import line

GIGA = 1e9
_CONSUMERS = {Op.RECV_F: (Op.FORWARD,), Op.RECV_B: (Op.BACKWARD, Op.BACKWARD_INPUT)}


def nanoseconds(seconds: float, begin: int) -> int:
    return begin + round(seconds * GIGA)


def records_of(timeline: Simulation, step: int = 0, *, overhead: float = 0.0, weigh: float = 0.0) -> list[Record]:
    """Return the records of a simulated step; of every action the last `overhead` seconds were not its own."""
    begin = 1_000_000_000 * (step + 1)
    messages: list[list[dict[str, int]]] = [[] for _ in timeline.tracks]
    for transfer in timeline.transfers:
        receive = rules.message_of(transfer.action).recv
        index = next(
            timeline.located[receive.stage, op, receive.microbatch][1]
            for op in _CONSUMERS[receive.op]
            if (receive.stage, op, receive.microbatch) in timeline.located
        )
        made, end, taken = (nanoseconds(at, begin) for at in (transfer.made, transfer.end, transfer.consumed))
        names = dict(zip(("stage", "op", "microbatch"), coded(receive), strict=True))
        moments = {"made": made, "sent": max(end, made + 1), "arrived": end, "from": taken, "to": taken, "bytes": 64}
        messages[transfer.target].append({"action": index, **names, "source": transfer.source, **moments})
    found = []
    for rank, track in enumerate(timeline.tracks):
        starts = [nanoseconds(at, begin) for at in track.starts]
        ends = [nanoseconds(at - overhead, begin) for at in track.ends]
        pairs = [after for _, after in timeline.memory[rank].pairs]
        waits = []
        for number, message in enumerate(messages[rank]):
            free = ends[message["action"] - 1] if message["action"] else begin
            if starts[message["action"]] > free:
                waits.append({**message, "message": number, "from": free, "to": starts[message["action"]]})
        found.append(
            Record(
                rank,
                step,
                begin_ns=begin,
                end_ns=nanoseconds(track.ends[-1], begin),
                starts=array("q", starts),
                ends=array("q", ends),
                held=array("q", pairs),
                stash=array("q", [round(weigh * pair) for pair in pairs] if weigh else []),
                peaks=array("q", [round(weigh * count) for count, _ in timeline.memory[rank].pairs] if weigh else []),
                waits=table("waits", waits),
                messages=table("messages", messages[rank]),
            )
        )
    return found


def table(name: str, rows: Sequence[Mapping[str, int]]) -> array[int]:
    """Return rows as a record's flat table, whatever columns it has."""
    return array("q", [row[column] for row in rows for column in COLUMNS[name]])


def write_simulated_run(
    path: Path,
    program: Program,
    costs: Costs,
    *,
    num_steps: int = 3,
    blocks: Sequence[Sequence[str]] | None = None,
    rows: int = 64,
    run: str = "abc",
    jitter: float = 0.0,
    overhead: float = 0.0,
    weigh: float = 0.0,
    **plan: Any,
) -> Path:
    """Write a run whose steps take what the simulator says; with `jitter` every action up to that share longer."""
    path.mkdir(exist_ok=True)
    (path / "program.csv").write_text(program.format() + "\n")
    described = {"run": run, "schedule": program.name, "blocks": blocks, **plan}
    (path / "plan.json").write_text(json.dumps(described))
    (path / "environment.json").write_text(json.dumps({"run": run}))
    chance = np.random.default_rng(0)
    lines: list[list[str]] = [[] for _ in range(program.num_ranks)]
    metrics = []
    work = sum(part.op is not Op.REDUCE_GRAD for part in program.work())
    for step in range(num_steps):
        timeline = simulate(program, _longer(costs, overhead), factors=1 + jitter * chance.random(work))
        for rank, record in enumerate(records_of(timeline, step, overhead=overhead, weigh=weigh)):
            lines[rank].append(line(record, run))
        seconds = timeline.makespan
        table = {
            "loss_metrics/global_avg_loss": 1 / (step + 1),
            "throughput(rows/s)": rows / seconds,
            "time_metrics/end_to_end(s)": seconds,
            "pp/makespan_seconds": timeline.makespan,
            "pp/bubble": timeline.bubble,
        }
        metrics.append(json.dumps({"run": run, "step": step, **table}, separators=(",", ":")) + "\n")
    for rank, text in enumerate(lines):
        (path / f"rank{rank}.jsonl").write_text("".join(text))
    (path / "metrics.jsonl").write_text("".join(metrics))
    (path / "config.json").write_text(json.dumps({"run": run, "format": FORMAT}))
    return path


def _longer(costs: Costs, seconds: float) -> Costs:
    """Return costs with every action that much longer."""
    if not seconds:
        return costs
    longer: dict[str, Any] = {
        name: [value + seconds for value in costs.per_stage(name, 2)] for name in ("forward", "backward_input")
    }
    return replace(costs, **longer)


def per_stage(*seconds: float, backward: float = 2.0) -> Costs:
    """Return costs with these forwards, and backwards that take a multiple of them."""
    return Costs(forward=list(seconds), backward_input=[duration * backward for duration in seconds], backward_weight=0)


def even_blocks(num_stages: int, each: int) -> list[list[str]]:
    """Return names of blocks, as many for each stage.

    >>> even_blocks(2, 2)
    [['0', '1'], ['2', '3']]
    """
    ends = range(0, (num_stages + 1) * each, each)
    return [[str(number) for number in range(i, j)] for i, j in pairwise(ends)]
