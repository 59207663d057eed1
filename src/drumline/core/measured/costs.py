"""Turn measured steps into costs, for advice and for searching a program, or replay them in the simulator.

    seconds of a stage's op    mean over its actions in all steps, without the lowest and highest tenth
    latency of an edge         median over its messages, from made to arrived; or over each step's fastest message

Replaying a step runs it through the simulator, with the measured seconds for every action.

    measured    F0 . F1  .  B0- . B1-      what the ranks did
    replayed    F0 F1 B0- B1-              the same seconds, every action as soon as its inputs allow

Each message takes the median time of its edge. The difference between the two is the executor's own time, plus messages
that took longer than others.

`Handling` is what a step spends on work other than compute:

    rank 0    0F0 │note│send│                        the sender copies a message, then continues
    rank 1              wait      │flight│take│ 1F0  the receiver wakes up and copies it before it computes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from drumline.core.action import RECV_OPS, Op
from drumline.core.costs import Costs, Edge
from drumline.core.graph import Floats
from drumline.core.measured.account import NANO
from drumline.core.measured.endless import is_part, simulate_part
from drumline.core.measured.measured import Measured, slice_costs, stage_costs
from drumline.core.measured.record import OVERHEADS, RECEIVES, Record
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.timeline import Timeline

_FIELDS = ("forward", "backward_input", "backward_weight", "backward", "update", "slice_factor")
_UNITS: dict[str, Any] = dict.fromkeys(_FIELDS, 1.0)
_BEGIN, _END = OVERHEADS.index("begin"), OVERHEADS.index("end")
_NOT_WORK = (Op.UNSHARD, Op.RESHARD)


def costs_of(steps: Sequence[Measured], *, quickest: bool = False) -> Costs:
    """Return the costs of stages and edges over several steps of one program; `quickest` is passed to `latencies`.

    A mean is used because a median misleads when a disturbed action takes one of two very different times.

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
    num_stages, num_slices = steps[0].program.num_stages, steps[0].program.num_slices
    middle = {key: _trimmed_mean(values) * num_slices for key, values in seconds.items()}
    edges, exchanges = latencies(steps, quickest=quickest), exchange_seconds(steps, num_stages)
    return Costs(**stage_costs(middle, num_stages), edges=edges, **exchanges, **slice_costs(steps))


def exchange_seconds(steps: Sequence[Timeline], num_stages: int) -> dict[str, Any]:
    """Return `pack` and `reduce`, per stage: seconds to copy its gradients together, and to exchange them.

    An exchange with other pipelines starts once the one before it has ended, as in the simulator. It lasts longer if
    this pipeline has to wait for another one, never shorter: so its lower quartile counts.
    """
    packed, exchanged = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for step in steps:
        copied = {(span.rank, span.action): span for span in step.packing}
        ended = dict[int, float]()
        for span in (exchange for exchange in step.exchanges if exchange.action.op is Op.REDUCE_GRAD):
            stage, copying = span.action.stage, copied.get((span.rank, span.action))
            if copying is not None:
                packed[stage].append(copying.end - copying.start)
            start = max(span.start, copying.end if copying else span.start, ended.get(span.rank, span.start))
            exchanged[stage].append(span.end - min(start, span.end))
            if not step.program.placement.mirrored:
                ended[span.rank] = span.end
    seconds = {
        "pack": [median(packed.get(stage, [0.0])) for stage in range(num_stages)],
        "reduce": [lower_quartile(exchanged.get(stage, [0.0])) for stage in range(num_stages)],
    }
    return {name: each if any(each) else 0.0 for name, each in seconds.items()}


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value that a quarter of the values are below.

    >>> lower_quartile([4.0, 1.0, 3.0, 9.0, 2.0])
    2.0
    """
    return sorted(values)[len(values) // 4]


def latencies(steps: Sequence[Timeline], *, quickest: bool = False) -> dict[tuple[int, int], Edge]:
    """Return the median time that a message of each edge took.

    With `quickest`, only the fastest message of each step counts: a message that arrives while its rank computes is
    picked up later.
    """
    latencies_by_edge: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        took: dict[tuple[int, int], list[float]] = defaultdict(list)
        for transfer in step.transfers:
            took[transfer.source, transfer.target].append(max(transfer.end - transfer.made, 0.0))
        for edge, seconds in took.items():
            latencies_by_edge[edge] += [min(seconds)] if quickest else seconds
    return {edge: Edge(median(seconds)) for edge, seconds in sorted(latencies_by_edge.items())}


def _trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest tenth.

    >>> _trimmed_mean([*[1.0] * 9, 100.0])
    1.0
    """
    left_out = len(values) // 10
    return fmean(sorted(values)[left_out : len(values) - left_out])


def replay(timeline: Timeline, *, transfers: bool = True) -> Simulation:
    r"""Simulate a step again, with the measured seconds of every action.

    Without `transfers`, messages take no time. What runs before and after a step of endless rows takes none either.

    >>> from drumline.core.program import Program
    >>> from drumline.core.measured.measured import Measured
    >>> from drumline.core.measured.record import Record
    >>> step = Measured(Program.parse("0F0,0B0"), (Record(0, starts=[0, 5], ends=[3, 9]),))
    >>> round(step.makespan * 1e9, 6), round(replay(step).makespan * 1e9, 6)
    (9.0, 7.0)
    >>> simulation = simulate(Program.parse("0F0,0B0\n1F0,1B0"), Costs(comm=0.5))
    >>> simulation.makespan, replay(simulation).makespan, replay(simulation, transfers=False).makespan
    (7.0, 7.0, 6.0)
    """
    costs = Costs(**_UNITS)
    if transfers:
        exchanges = exchange_seconds([timeline], timeline.program.num_stages)
        costs = replace(costs, edges=latencies([timeline]), message_bytes=_message_bytes(timeline), **exchanges)
    if is_part(timeline.program):
        seconds = _action_seconds(timeline)
        return simulate_part(timeline.program, costs, seconds, timeline.in_flight, timeline.memory)
    simulation = simulate(timeline.program, costs, factors=_action_seconds(timeline))
    return replace(simulation, weighed=timeline.memory)  # same actions in the same order, so the same memory


def _message_bytes(timeline: Timeline) -> list[float]:
    """Return a microbatch's bytes that cross the boundary after each stage, as the median over its messages."""
    sizes: dict[int, list[float]] = defaultdict(list)
    for transfer in timeline.transfers:
        sizes[transfer.action.stage - (transfer.action.op is Op.SEND_B)].append(transfer.num_bytes)
    program = timeline.program
    return [median(sizes.get(stage, [0.0])) * program.num_slices for stage in range(program.num_stages)]


def _action_seconds(timeline: Timeline) -> Floats:
    """Return the seconds of every action, row by row; each half of an overlapped pair gets half of the pair's."""
    seconds = []
    for track in timeline.tracks:
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
            if action.op not in _NOT_WORK:
                seconds += [(end - start) / len(action.work)] * len(action.work)
    return np.array(seconds)


@dataclass(frozen=True, slots=True)
class Handling:
    """Seconds to send a message, wake up for it and take it; seconds per action; seconds to begin and end a step."""

    send: float = 0.0
    flight: float = 0.0
    take: float = 0.0
    action: float = 0.0
    begin: float = 0.0
    end: float = 0.0

    @staticmethod
    def measured(timelines: Sequence[Measured]) -> Handling:
        """Return the medians over all messages and actions of the measured steps."""
        samples: dict[str, list[float]] = {field.name: [] for field in fields(Handling)}
        for timeline in timelines:
            for record, parts in zip(timeline.records, timeline.parts, strict=True):
                begin, end = (_overhead(record, kind) for kind in (_BEGIN, _END))
                own_seconds = (parts.overhead + parts.unexplained) / NANO - begin - end
                samples["send"] += [to - since for *_, since, to, _ in record.rows("sends")]
                samples["flight"] += _flights(timeline, record.rank)
                samples["take"] += [to - since for *_, since, to, _ in record.rows("messages")]
                samples["action"].append(own_seconds / len(record.starts))
                samples["begin"].append(begin)
                samples["end"].append(end)
        return Handling(**{name: median(each) * NANO for name, each in samples.items() if each})


def ends_of(timeline: Measured) -> list[float]:
    """Return, per rank, the seconds that ending the step took: checking its gradients."""
    return [_overhead(record, _END) * NANO for record in timeline.records]


def _overhead(record: Record, kind: int) -> int:
    return sum(end - start for number, start, end in record.rows("overheads") if number == kind)


def _flights(timeline: Measured, rank: int) -> list[int]:
    """Return how long each message that the rank waited for took, from leaving to being taken."""
    record = timeline.records[rank]
    messages = list(record.rows("messages"))
    flights = []
    for number, start, _ in record.rows("waits"):
        _, _, op, _, source, ready, sent, _, taken, _, _ = messages[number]
        if RECEIVES[op] in RECV_OPS and timeline.here(rank, source, ready) > start:
            flights.append(max(taken - timeline.here(rank, source, sent), 0))
    return flights
