"""What no setting of the pipeline mends, but is worth knowing: a slow link, time outside of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from drumline.core.costs import Edge
from drumline.core.simulate import makespans
from drumline.report.observed import Observed
from drumline.report.remedy import LEAST_GAIN, Remedy, duration, predicted

_EDGES = 8  # those with the slowest messages
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
    whole = next((one.get("time_metrics/end_to_end(s)") for one in seen.metrics if one["step"] == seen.step), None)
    inside = seen.measured.parts[0].total
    if whole and whole - inside > _OUTSIDE * whole:
        share = (whole - inside) / whole
        sentence = (
            f"{share:.0%} of the time from step to step passes outside of the step ({duration(whole - inside)} of "
            f"{duration(whole)}): look at the optimizer and at how batches are made"
        )
        yield Remedy("outside", sentence)
