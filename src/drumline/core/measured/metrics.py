"""The metrics of one step. Names follow torchtitan where it has one; our own start with pp/.

::

    time_metrics/end_to_end(s)           from the end of the previous step to the end of this one, on rank 0
    time_metrics/data_loading(s)         the part of it spent waiting for data, on the rank that waited longest
    pp/bubble                            idle share of the makespan over all ranks
    pp/stage{i}/busy_seconds             compute of the stage, on all ranks that hold it
    pp/rank{r}/{part}_seconds            the rank's step by what it did: busy, transfer, wait, overhead, unexplained
    pp/rank{r}/{kind}_seconds            time between the previous step and this one: update, data, ..., outside
    pp/rank{r}/peak_pairs, peak_stash_bytes     what the rank held; bytes only if they were weighed
    pp/edge{a}-{b}/peak_queue            the most messages that were made and not yet used
    expert_metrics/load_max, dropped     of models with dl.MoE: the busiest expert over the mean, choices not served
    pp/clock_error_seconds               with ranks on several hosts: the possible clock error
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields

from drumline.core.action import Op
from drumline.core.measured.account import NANO, StepParts
from drumline.core.measured.align import Dial
from drumline.core.measured.measured import Measured
from drumline.core.measured.record import BETWEEN, RECEIVES, Record
from drumline.core.program import Program

_PARTS = tuple(field.name for field in fields(StepParts))


def step_metrics(program: Program, records: Sequence[Record], dials: tuple[Dial, ...] = ()) -> dict[str, float]:
    """Return the metrics of a step, without those that need action times if the step was captured."""
    makespans = _of_period(records)
    if not all(record.starts for record in records):
        return makespans
    timeline = Measured(program, tuple(records), dials=dials)
    busy = [(sum(record.ends) - sum(record.starts)) * NANO for record in records]
    ends = [[timeline.seconds(entry.rank, moment) for moment in (entry.starts[0], entry.ends[-1])] for entry in records]
    last = max([end for _, end in ends] + [span.end for span in timeline.exchanges])
    makespan, span = last - min(start for start, _ in ends), max(end - start for start, end in ends)
    makespans["pp/makespan_seconds"] = makespan
    makespans["pp/bubble"] = 1.0 - sum(busy) / (len(records) * makespan)
    makespans["pp/span_bubble"] = 1.0 - sum(busy) / (len(records) * span)
    makespans |= _of_stages(program, records)
    for rank, parts in enumerate(timeline.parts):
        makespans |= {f"pp/rank{rank}/{name}_seconds": getattr(parts, name) for name in _PARTS}
        makespans[f"pp/rank{rank}/peak_pairs"] = max(records[rank].held)
        if records[rank].is_weighed:
            makespans[f"pp/rank{rank}/peak_stash_bytes"] = max(records[rank].peaks)
    if timeline.clock_error:
        makespans["pp/clock_error_seconds"] = timeline.clock_error
    return makespans | _of_queues(timeline)


def _of_stages(program: Program, records: Sequence[Record]) -> dict[str, float]:
    """Return each stage's compute time; an overlapped pair counts half for each of its two stages."""
    stages = defaultdict[int, float](int)
    for row, record in zip(program.timed_rows, records, strict=True):
        for action, start, end in zip(row, record.starts, record.ends, strict=True):
            for part in action.work:
                stages[part.stage] += (end - start) / len(action.work)
    return {f"pp/stage{stage}/busy_seconds": nanoseconds * NANO for stage, nanoseconds in sorted(stages.items())}


def _of_queues(timeline: Measured) -> dict[str, float]:
    """Return each edge's deepest queue, counted right after each message: messages made minus messages used.

    `Timeline.queue_depths` returns whole curves but takes twenty times as long, which is too slow for every step.
    """
    edges = defaultdict[tuple[int, int], tuple[list[int], list[int]]](lambda: ([], []))
    exchange = RECEIVES.index(Op.REDUCE_GRAD)
    for record in timeline.records:
        for _, _, op, _, source, ready, *_, taken, _ in record.rows("messages"):
            if op != exchange:
                both = edges[source, record.rank]
                both[0].append(timeline.common(source, ready))
                both[1].append(timeline.common(record.rank, taken))
    return {
        f"pp/edge{source}-{target}/peak_queue": max(
            number - bisect_right(taken, moment) for number, moment in enumerate(ready_times, start=1)
        )
        for (source, target), (ready_times, taken) in sorted(
            (edge, tuple(map(sorted, both))) for edge, both in edges.items()
        )
    }


def _of_period(records: Sequence[Record]) -> dict[str, float]:
    """Return where the time went between the end of the previous step and the end of this one."""
    whole = (records[0].end_ns - records[0].since_ns) * NANO
    metrics = {"time_metrics/end_to_end(s)": whole}
    longest = 0.0
    for record in records:
        passed = defaultdict[int, int](int)
        for kind, start, end in record.rows("between"):
            passed[kind] += end - start
        outside = record.begin_ns - record.since_ns - sum(passed.values())
        for kind, name in enumerate(BETWEEN):
            if passed[kind]:
                metrics[f"pp/rank{record.rank}/{name}_seconds"] = passed[kind] * NANO
        metrics[f"pp/rank{record.rank}/outside_seconds"] = outside * NANO
        longest = max(longest, passed[BETWEEN.index("data")] * NANO)
    metrics["time_metrics/data_loading(s)"] = longest
    metrics["time_metrics/data_loading(%)"] = 100.0 * longest / whole if whole > 0 else 0.0
    return metrics


def load_metrics(loads: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the metrics of all blocks: what each expert got, and behind that what was dropped.

    `load_max` is what the busiest expert got, divided by the mean of its block; 1 is balanced. `dropped` is the part of
    all choices that no expert took.

    >>> load_metrics([[3, 1, 0], [2, 2, 4]])
    {'expert_metrics/load_max': 1.5, 'expert_metrics/dropped': 0.3333333333333333}
    """
    if not loads:
        return {}
    busiest = max(max(load[:-1]) * (len(load) - 1) / max(sum(load[:-1]), 1) for load in loads)
    dropped = sum(load[-1] for load in loads) / max(sum(map(sum, loads)), 1)
    return {"expert_metrics/load_max": busiest, "expert_metrics/dropped": dropped}
