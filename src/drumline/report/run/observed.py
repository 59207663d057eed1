"""A run as it is reported: one of its steps as it was measured, the same in the simulator, and what stages cost.

The step is the typical one unless another is asked for: in the middle by its makespan, the first step, which warms up,
aside. Costs are the middle of steps like it, so that one that was disturbed does not decide what is advised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drumline.core.measured.measured import Measured
from drumline.core.measured.replay import replay, typical_costs
from drumline.core.measured.run import Run
from drumline.report.advise.remedy import Evidence

MAKESPAN = "pp/makespan_seconds"
_POOLED = 15  # steps whose seconds are taken together


@dataclass(frozen=True, kw_only=True)
class Observed(Evidence):
    """One step of a run of ours; its costs are those of `pooled` steps like it."""

    measured: Measured
    run: Run
    pooled: tuple[int, ...]


def observe(run: Run, step: int | None = None) -> Observed:
    """Return what a report is made from; RecordError says what is missing."""
    steps, metrics = run.steps, run.metrics()
    near = [step] if step is not None else _typical(metrics, steps)
    chosen = near[len(near) // 2] if near else None
    measured = run.timeline(chosen)
    number = measured.records[0].step
    pooled = tuple(near or [number])
    timelines = [measured if one == number else run.timeline(one) for one in pooled]
    return Observed(
        measured=measured,
        simulated=replay(measured),
        costs=typical_costs(timelines),
        step=number,
        plan=run.plan,
        metrics=metrics,
        run=run,
        pooled=pooled,
    )


def _typical(metrics: Sequence[dict[str, Any]], steps: Sequence[int]) -> list[int]:
    """Return the steps around the one in the middle, by their makespan.

    >>> _typical([{"step": at, MAKESPAN: seconds} for at, seconds in enumerate((90, 5, 3, 4))], range(4))
    [2, 3, 1]
    """
    known = set(steps)
    timed = [(one[MAKESPAN], one["step"]) for one in metrics if one.get(MAKESPAN) is not None and one["step"] in known]
    ordered = [step for _, step in sorted(timed[1:] or timed)]
    first = max(0, (len(ordered) - _POOLED) // 2)
    return ordered[first : first + _POOLED]
