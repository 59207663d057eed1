"""Measured steps become costs, for advice and for the search of a program.

seconds of a stage's op    the mean of all its actions in all steps, without the tenths at both ends
latency of an edge         the median of its messages, from being made to being there; or of each step's quickest
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

from drumline.core.action import Op
from drumline.core.costs import Costs, Edge
from drumline.core.measured.measured import Measured, stage_costs
from drumline.core.timeline.timeline import Timeline


def costs_of(steps: Sequence[Measured], *, quickest: bool = False) -> Costs:
    """Return the costs of stages and edges over several steps of one program; `quickest` is for `latencies`.

    A median of seconds would be misled where a disturbed action takes one of two very different times.

    >>> from drumline.core.program import Program
    >>> from drumline.core.measured.record import Record
    >>> steps = [Measured(Program.parse("0F0,0B0"), (Record(0, starts=[0, 5], ends=[e, 9]),)) for e in (3, 4, 2)]
    >>> round(costs_of(steps).per_stage("forward", 1)[0] * 1e9, 6)
    3.0
    """
    seconds: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for step in steps:
        for key, values in step.action_seconds().items():
            seconds[key] += values
    middle = {key: _trimmed_mean(values) for key, values in seconds.items()}
    return Costs(**stage_costs(middle, steps[0].program.num_stages), edges=latencies(steps, quickest=quickest))


def latencies(steps: Sequence[Timeline], *, quickest: bool = False) -> dict[tuple[int, int], Edge]:
    """Return what a message of each edge took in the middle.

    With `quickest` only the quickest of each step counts: a message that came while its rank was computing was taken up
    later.
    """
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        took: dict[tuple[int, int], list[float]] = defaultdict(list)
        for one in step.transfers:
            took[one.source, one.target].append(max(one.end - one.made, 0.0))
        for edge, seconds in took.items():
            found[edge] += [min(seconds)] if quickest else seconds
    return {edge: Edge(median(seconds)) for edge, seconds in sorted(found.items())}


def _trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest tenth.

    >>> _trimmed_mean([*[1.0] * 9, 100.0])
    1.0
    """
    left_out = len(values) // 10
    return fmean(sorted(values)[left_out : len(values) - left_out])
