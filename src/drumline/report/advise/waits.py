"""Problems that no pipeline setting fixes, but worth knowing: messages, overhead, time outside the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from drumline.core.costs import Edge
from drumline.core.measured.measured import Measured
from drumline.core.simulate.simulate import makespans
from drumline.core.timeline.idle import Cause
from drumline.core.units import duration, ms, size_text
from drumline.plan.device.advice import LEAST_GAIN, Remedy, predicted
from drumline.report.advise.evidence import Evidence

_EDGES = 8  # the edges with the slowest messages
_KINDS = {
    "update": "the optimizer",
    "data": "waiting for data",
    "clip": "clipping",
    "hear": "waiting for other ranks",
    "write": "writing records",
    "evaluate": "evaluating",
    "save": "saving a checkpoint",
    "move": "moving layers between ranks",
    "outside": "your own code",
}
_WAYS = {
    "posting messages": "larger microbatches post fewer of them",
    "launching kernels": "larger microbatches, torch.compile or CUDA graphs launch fewer of them",
    "made and not yet sent": "sends are posted late, or wait in a queue for other messages",
}
_OUTSIDE = 0.2  # share of the time from step to step; updates and data always take some


def slow_link(evidence: Evidence) -> Iterator[Remedy]:
    """Yield the edge whose messages delay the step the most."""
    program, costs, measured = evidence.program, evidence.costs, evidence.measured.makespan
    before = evidence.middle.makespan
    slowest = sorted(costs.edges, key=lambda edge: -costs.edges[edge].latency)[:_EDGES]
    without = [replace(costs, edges={**costs.edges, edge: Edge()}) for edge in slowest]
    gains = [(before - after) / measured for after in makespans(program, without).tolist()]
    gain = max(gains, default=0.0)
    if gain >= LEAST_GAIN:
        source, target = slowest[gains.index(gain)]
        took = duration(costs.edges[source, target].latency)
        sentence = (
            f"A message from rank {source} to rank {target} takes {took}, and the step waits for it: "
            f"use a faster link, {predicted(gain)} at most"
        )
        yield Remedy("link", sentence, gain, {}, "assuming that messages take no time at all")


def time_outside(evidence: Evidence) -> Iterator[Remedy]:
    """Yield how much of the time from step to step is spent outside steps, if it is a lot."""
    if not isinstance(evidence.measured, Measured):
        return
    whole, inside = evidence.line.get("time_metrics/end_to_end(s)"), evidence.measured.parts[0].total
    if whole and whole - inside > _OUTSIDE * whole:
        share = (whole - inside) / whole
        taken = {what: evidence.line.get(f"pp/rank0/{kind}_seconds") or 0.0 for kind, what in _KINDS.items()}
        most = sorted((seconds, what) for what, seconds in taken.items() if seconds > _OUTSIDE * (whole - inside))
        named = ", ".join(f"{what} {duration(seconds)}" for seconds, what in reversed(most))
        took = duration(whole - inside)
        sentence = f"{share:.0%} of the time from step to step is outside the step, {took} on rank 0"
        yield Remedy("outside", f"{sentence}: {named}" if named else sentence)


def lost_time(evidence: Evidence) -> Iterator[Remedy]:
    """Yield the cost of transfer, overhead and unexplained time, if the pipeline is not ours to configure.

    The loss is measured against the step's own order and times in the simulator; idle time by cause divides it.
    """
    if evidence.plan is not None:
        return
    timeline, lost = evidence.measured, evidence.measured.makespan - evidence.simulated.makespan
    by_cause = dict.fromkeys((Cause.TRANSFER, Cause.OVERHEAD, Cause.UNEXPLAINED), 0.0)
    for idle in timeline.causes:
        if idle.cause in by_cause:
            by_cause[idle.cause] += idle.seconds
    total = sum(by_cause.values())
    for cause, seconds in by_cause.items():
        gain = lost * seconds / total if total else 0.0
        cost = f"costs about {ms(gain)} of the {ms(timeline.makespan)}"
        yield Remedy(cause.value, _LOST[cause](evidence, cost), gain / timeline.makespan)


def _transfer(evidence: Evidence, cost: str) -> str:
    transfers = evidence.measured.transfers
    sizes = [transfer.num_bytes for transfer in transfers if transfer.num_bytes]
    each = f", {size_text(max(sizes))} each" if sizes else ""
    return (
        f"Messages are the bottleneck: waiting for messages on their way {cost} ({len(transfers)} messages{each}). "
        "A faster link, a narrower type or fewer stages per rank would help"
    )


def _overhead(evidence: Evidence, cost: str) -> str:
    kind = next(iter(evidence.kinds), "")
    hint = f": {_WAYS[kind]}" if kind in _WAYS else ""
    return f"The ranks' own overhead is the bottleneck: it {cost}, most of it {kind}{hint}"


def _unexplained(evidence: Evidence, cost: str) -> str:
    return (
        f"Check what the traces do not name: it {cost}. "
        "Record with with_stack=True, or label the rest of the step with record_function"
    )


_LOST = {Cause.TRANSFER: _transfer, Cause.OVERHEAD: _overhead, Cause.UNEXPLAINED: _unexplained}
