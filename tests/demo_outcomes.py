"""Outcomes of the demo that a simulation stands in for: runs with all that a report shows, trained by nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.core.measured.run import Run, read_run
from drumline.schedules import generate
from simulated_runs import even_blocks, per_stage, write_simulated_run

if TYPE_CHECKING:
    from drumline.train.demo import Outcome


def run_of(folder: Path, name: str, schedule: str, num_microbatches: int = 4, num_steps: int = 4) -> Run:
    """Write a run with all that a report shows: losses, bytes, queues and blocks."""
    program, costs = generate(schedule, num_ranks=2, num_microbatches=num_microbatches), per_stage(1e-3, 2e-3)
    overhead = 0.0 if schedule in ("zb-h1", "pipedream-2bw") else 1e-4  # which have actions that take no time here
    given: dict[str, Any] = {"blocks": even_blocks(2, 4), "overhead": overhead, "num_steps": num_steps}
    path = write_simulated_run(folder / name, program, costs, jitter=0.1, weigh=1e6, **given)
    lines = [
        json.loads(line) | {"pp/edge0-1/peak_queue": 2} for line in (path / "metrics.jsonl").read_text().splitlines()
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return read_run(path)


def demo_outcomes(folder: Path) -> list[Outcome]:
    """Write a run for each trial of the demo."""
    from drumline.train.demo import TRIALS, Outcome
    from drumline.train.two_stages import Build

    return [
        Outcome(Build(), trial, run, losses=(1.0, 0.5), difference=0.0)
        for trial in TRIALS
        for run in [run_of(folder, trial.name, trial.schedule, trial.num_microbatches, num_steps=2)]
    ]
