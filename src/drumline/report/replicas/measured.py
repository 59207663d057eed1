"""How much durations varied in what was measured: a recorded run, or the traces of one."""

from __future__ import annotations

from pathlib import Path

from drumline.core.measured.run import CONFIG, read_run
from drumline.report.kineto.analysis import analyze
from drumline.report.replicas.spread import Spread


def measured_spread(path: str | Path, links: float = 0.0) -> Spread:
    """Return the factors of all steps of a recorded run, or of the median step of a folder of profiler traces.

    `links` is the relative standard deviation of links.
    """
    if (Path(path) / CONFIG).is_file():
        recorded = read_run(path)
        return Spread.measured((recorded.timeline(step) for step in recorded.steps), links)
    return Spread.measured((analyze([path]).timeline,), links)
