"""What a decision reads from a measured step: series to watch, and every stage's work."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from statistics import fmean, median

from drumline.core.action import COMPUTE_OPS
from drumline.core.measured.measured import Measured

NAMED_LINK = "a message on link "
NAMED_QUEUE = "the queue of link "


def stage_seconds(measured: Measured) -> list[float]:
    """Return the seconds of a microbatch in every stage, forward and backward; overlapped pairs count half for each."""
    values = [0.0] * measured.program.num_stages
    for (stage, op), seconds in measured.action_seconds(halves=True).items():
        values[stage] += sum(seconds) if op in COMPUTE_OPS else 0.0
    return [value / measured.program.num_microbatches for value in values]


def series_of(measured: Measured) -> dict[str, float]:
    """Return what is watched, by name: seconds of every stage's ops, of messages on every link, and queues.

    A message counts with a typical action, and a queue with one message: what is small beside those is noise.
    """
    each = measured.action_seconds()
    series = {f"{op.value} of stage {stage}": median(values) for (stage, op), values in sorted(each.items())}
    flights, waits = defaultdict[tuple[int, int], list[float]](list), defaultdict[tuple[int, int], float](float)
    for transfer in measured.transfers:
        edge = transfer.source, transfer.target
        flights[edge].append(max(transfer.end - transfer.made, 0.0))
        waits[edge] += max(transfer.consumed - transfer.end, 0.0)
    typical = fmean(chain.from_iterable(each.values())) if each and flights else 0.0
    for edge, seconds in sorted(flights.items()):
        series[f"{NAMED_LINK}{edge[0]}-{edge[1]}"] = typical + min(seconds)
        series[f"{NAMED_QUEUE}{edge[0]}-{edge[1]}"] = 1.0 + waits[edge] / max(measured.makespan, 1e-12)
    return series
