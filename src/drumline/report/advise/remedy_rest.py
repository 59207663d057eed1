"""What no setting of the pipeline mends, but is worth knowing: a slow link, time outside of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from drumline.core.costs import Edge
from drumline.core.simulate.simulate import makespans
from drumline.report.advise.remedy import LEAST_GAIN, Remedy, predicted
from drumline.report.run.observed import Observed
from drumline.report.units import duration

_EDGES = 8  # those with the slowest messages
_KINDS = {
    "update": "the optimizer",
    "data": "waiting for data",
    "clip": "clipping",
    "hear": "waiting for other ranks",
    "write": "writing records",
    "evaluate": "evaluating",
    "outside": "your own code",
}
_OUTSIDE = 0.2  # of the time from step to step; updates and data always take some


def slow_link(seen: Observed) -> Iterator[Remedy]:
    """Yield the edge whose messages delay the step most."""
    program, costs, measured = seen.run.program, seen.costs, seen.measured.makespan
    before = seen.middle.makespan
    slowest = sorted(costs.edges, key=lambda edge: -costs.edges[edge].latency)[:_EDGES]
    without = [replace(costs, edges={**costs.edges, edge: Edge()}) for edge in slowest]
    found = [(before - after) / measured for after in makespans(program, without).tolist()]
    gain = max(found, default=0.0)
    if gain >= LEAST_GAIN:
        source, target = slowest[found.index(gain)]
        took = duration(costs.edges[source, target].latency)
        sentence = (
            f"A message from rank {source} to rank {target} takes {took}, and the step waits for it: "
            f"use a faster link, {predicted(gain)} at most"
        )
        yield Remedy("link", sentence, gain, {}, "if messages took no time at all")


def time_outside(seen: Observed) -> Iterator[Remedy]:
    """Yield how much of the time from step to step is not spent in steps, where it is much."""
    line = next((one for one in seen.metrics if one["step"] == seen.step), {})
    whole, inside = line.get("time_metrics/end_to_end(s)"), seen.measured.parts[0].total
    if whole and whole - inside > _OUTSIDE * whole:
        share = (whole - inside) / whole
        taken = {what: line.get(f"pp/rank0/{kind}_seconds") or 0.0 for kind, what in _KINDS.items()}
        most = sorted((seconds, what) for what, seconds in taken.items() if seconds > _OUTSIDE * (whole - inside))
        named = ", ".join(f"{what} {duration(seconds)}" for seconds, what in reversed(most))
        took = duration(whole - inside)
        sentence = f"{share:.0%} of the time from step to step passes outside of the step, {took} on rank 0"
        yield Remedy("outside", f"{sentence}: {named}" if named else sentence)
